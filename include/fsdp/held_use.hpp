// SPDX-License-Identifier: Apache-2.0
// A former path of scopes.hpp, for one version.
#pragma once

#if defined(__GNUC__)
#pragma GCC warning "fsdp/held_use.hpp is fsdp/scopes.hpp now"
#endif
#include "fsdp/scopes.hpp"
