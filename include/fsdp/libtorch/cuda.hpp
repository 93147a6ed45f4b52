// SPDX-License-Identifier: Apache-2.0
// A former path of libtorch_cuda.hpp, for one version.
#pragma once

#if defined(__GNUC__)
#pragma GCC warning "fsdp/libtorch/cuda.hpp is fsdp/libtorch_cuda.hpp now"
#endif
#include "fsdp/libtorch_cuda.hpp"
