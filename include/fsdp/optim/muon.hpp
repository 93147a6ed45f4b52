// SPDX-License-Identifier: Apache-2.0
// A former path of muon.hpp, for one version.
#pragma once

#if defined(__GNUC__)
#pragma GCC warning "fsdp/optim/muon.hpp is fsdp/muon.hpp now"
#endif
#include "fsdp/muon.hpp"
