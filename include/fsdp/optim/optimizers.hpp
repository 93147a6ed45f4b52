// SPDX-License-Identifier: Apache-2.0
// A former path of optimizers.hpp, for one version.
#pragma once

#if defined(__GNUC__)
#pragma GCC warning "fsdp/optim/optimizers.hpp is fsdp/optimizers.hpp now"
#endif
#include "fsdp/optimizers.hpp"
