// SPDX-License-Identifier: Apache-2.0
// A former path of plan.hpp, for one version.
#pragma once

#if defined(__GNUC__)
#pragma GCC warning "fsdp/plan/hardware.hpp is fsdp/plan.hpp now"
#endif
#include "fsdp/plan.hpp"
