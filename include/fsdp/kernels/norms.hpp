// SPDX-License-Identifier: Apache-2.0
// A former path of kernels.hpp, for one version.
#pragma once

#if defined(__GNUC__)
#pragma GCC warning "fsdp/kernels/norms.hpp is fsdp/kernels.hpp now"
#endif
#include "fsdp/kernels.hpp"
