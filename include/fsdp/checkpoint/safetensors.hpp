// SPDX-License-Identifier: Apache-2.0
// A former path of safetensors.hpp, for one version.
#pragma once

#if defined(__GNUC__)
#pragma GCC warning "fsdp/checkpoint/safetensors.hpp is fsdp/safetensors.hpp now"
#endif
#include "fsdp/safetensors.hpp"
