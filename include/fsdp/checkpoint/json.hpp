// SPDX-License-Identifier: Apache-2.0
// A former path of json.hpp, for one version.
#pragma once

#if defined(__GNUC__)
#pragma GCC warning "fsdp/checkpoint/json.hpp is fsdp/json.hpp now"
#endif
#include "fsdp/json.hpp"
