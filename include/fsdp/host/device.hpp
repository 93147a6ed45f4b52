// SPDX-License-Identifier: Apache-2.0
// A former path of host.hpp, for one version.
#pragma once

#if defined(__GNUC__)
#pragma GCC warning "fsdp/host/device.hpp is fsdp/host.hpp now"
#endif
#include "fsdp/host.hpp"
