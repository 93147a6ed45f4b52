// SPDX-License-Identifier: Apache-2.0
// A former path of files.hpp, for one version.
#pragma once

#if defined(__GNUC__)
#pragma GCC warning "fsdp/checkpoint/files.hpp is fsdp/files.hpp now"
#endif
#include "fsdp/files.hpp"
