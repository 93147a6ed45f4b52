// SPDX-License-Identifier: Apache-2.0
// A former path of tensor.hpp, for one version.
#pragma once

#if defined(__GNUC__)
#pragma GCC warning "fsdp/precision.hpp is fsdp/tensor.hpp now"
#endif
#include "fsdp/tensor.hpp"
