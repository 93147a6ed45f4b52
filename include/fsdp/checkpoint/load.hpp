// SPDX-License-Identifier: Apache-2.0
// A former path of checkpoint.hpp, for one version.
#pragma once

#if defined(__GNUC__)
#pragma GCC warning "fsdp/checkpoint/load.hpp is fsdp/checkpoint.hpp now"
#endif
#include "fsdp/checkpoint.hpp"
