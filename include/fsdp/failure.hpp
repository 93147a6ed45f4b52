// SPDX-License-Identifier: Apache-2.0
// A former path of error.hpp, for one version.
#pragma once

#if defined(__GNUC__)
#pragma GCC warning "fsdp/failure.hpp is fsdp/error.hpp now"
#endif
#include "fsdp/error.hpp"
