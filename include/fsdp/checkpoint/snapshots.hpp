// SPDX-License-Identifier: Apache-2.0
// A former path of snapshots.hpp, for one version.
#pragma once

#if defined(__GNUC__)
#pragma GCC warning "fsdp/checkpoint/snapshots.hpp is fsdp/snapshots.hpp now"
#endif
#include "fsdp/snapshots.hpp"
