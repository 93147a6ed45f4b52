// SPDX-License-Identifier: Apache-2.0
// A former path of program.hpp, for one version.
#pragma once

#if defined(__GNUC__)
#pragma GCC warning "fsdp/step/memory_plan.hpp is fsdp/program.hpp now"
#endif
#include "fsdp/program.hpp"
