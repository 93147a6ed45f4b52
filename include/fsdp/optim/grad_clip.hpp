// SPDX-License-Identifier: Apache-2.0
// A former path of gradients.hpp, for one version.
#pragma once

#if defined(__GNUC__)
#pragma GCC warning "fsdp/optim/grad_clip.hpp is fsdp/gradients.hpp now"
#endif
#include "fsdp/gradients.hpp"
