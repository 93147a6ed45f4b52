// SPDX-License-Identifier: Apache-2.0
// A former path of bootstrap.hpp, for one version.
#pragma once

#if defined(__GNUC__)
#pragma GCC warning "fsdp/comm/common/bootstrap.hpp is fsdp/bootstrap.hpp now"
#endif
#include "fsdp/bootstrap.hpp"
