// SPDX-License-Identifier: Apache-2.0
// A former path of finite_state.hpp, for one version.
#pragma once

#if defined(__GNUC__)
#pragma GCC warning "fsdp/checkpoint/finite_state.hpp is fsdp/finite_state.hpp now"
#endif
#include "fsdp/finite_state.hpp"
