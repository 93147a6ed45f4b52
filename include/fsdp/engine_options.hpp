// SPDX-License-Identifier: Apache-2.0
// A former path of options.hpp, for one version.
#pragma once

#if defined(__GNUC__)
#pragma GCC warning "fsdp/engine_options.hpp is fsdp/options.hpp now"
#endif
#include "fsdp/options.hpp"
