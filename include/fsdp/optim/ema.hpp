// SPDX-License-Identifier: Apache-2.0
// A former path of ema.hpp, for one version.
#pragma once

#if defined(__GNUC__)
#pragma GCC warning "fsdp/optim/ema.hpp is fsdp/ema.hpp now"
#endif
#include "fsdp/ema.hpp"
