// SPDX-License-Identifier: Apache-2.0
// A former path of local.hpp, for one version.
#pragma once

#if defined(__GNUC__)
#pragma GCC warning "fsdp/comm/local.hpp is fsdp/local.hpp now"
#endif
#include "fsdp/local.hpp"
