// SPDX-License-Identifier: Apache-2.0
// A former path of module_buffers.hpp, for one version.
#pragma once

#if defined(__GNUC__)
#pragma GCC warning "fsdp/engine/module_buffers.hpp is fsdp/module_buffers.hpp now"
#endif
#include "fsdp/module_buffers.hpp"
