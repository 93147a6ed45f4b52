// SPDX-License-Identifier: Apache-2.0
// A former path of strategy.hpp, for one version.
#pragma once

#if defined(__GNUC__)
#pragma GCC warning "fsdp/placement.hpp is fsdp/strategy.hpp now"
#endif
#include "fsdp/strategy.hpp"
