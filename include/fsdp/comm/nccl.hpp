// SPDX-License-Identifier: Apache-2.0
// A former path of nccl.hpp, for one version.
#pragma once

#if defined(__GNUC__)
#pragma GCC warning "fsdp/comm/nccl.hpp is fsdp/nccl.hpp now"
#endif
#include "fsdp/nccl.hpp"
