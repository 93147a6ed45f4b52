// SPDX-License-Identifier: Apache-2.0
// A former path of memory.hpp, for one version.
#pragma once

#if defined(__GNUC__)
#pragma GCC warning "fsdp/staging.hpp is fsdp/memory.hpp now"
#endif
#include "fsdp/memory.hpp"
