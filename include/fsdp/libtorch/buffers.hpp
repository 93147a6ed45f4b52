// SPDX-License-Identifier: Apache-2.0
// A former path of libtorch.hpp, for one version.
#pragma once

#if defined(__GNUC__)
#pragma GCC warning "fsdp/libtorch/buffers.hpp is fsdp/libtorch.hpp now"
#endif
#include "fsdp/libtorch.hpp"
