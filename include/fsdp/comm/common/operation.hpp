// SPDX-License-Identifier: Apache-2.0
// A former path of detail/comm/messages.hpp, for one version.
#pragma once

#if defined(__GNUC__)
#pragma GCC warning "fsdp/comm/common/operation.hpp is fsdp/detail/comm/messages.hpp now"
#endif
#include "fsdp/detail/comm/messages.hpp"
