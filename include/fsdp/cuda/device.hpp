// SPDX-License-Identifier: Apache-2.0
// A former path of cuda.hpp, for one version.
#pragma once

#if defined(__GNUC__)
#pragma GCC warning "fsdp/cuda/device.hpp is fsdp/cuda.hpp now"
#endif
#include "fsdp/cuda.hpp"
