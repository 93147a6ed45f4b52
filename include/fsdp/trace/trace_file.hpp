// SPDX-License-Identifier: Apache-2.0
// A former path of trace.hpp, for one version.
#pragma once

#if defined(__GNUC__)
#pragma GCC warning "fsdp/trace/trace_file.hpp is fsdp/trace.hpp now"
#endif
#include "fsdp/trace.hpp"
