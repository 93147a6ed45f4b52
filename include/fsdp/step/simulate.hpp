// SPDX-License-Identifier: Apache-2.0
// A former path of simulate.hpp, for one version.
#pragma once

#if defined(__GNUC__)
#pragma GCC warning "fsdp/step/simulate.hpp is fsdp/simulate.hpp now"
#endif
#include "fsdp/simulate.hpp"
