// SPDX-License-Identifier: Apache-2.0
// A former path of full_state.hpp, for one version.
#pragma once

#if defined(__GNUC__)
#pragma GCC warning "fsdp/checkpoint/full_state.hpp is fsdp/full_state.hpp now"
#endif
#include "fsdp/full_state.hpp"
