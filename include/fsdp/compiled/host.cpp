// SPDX-License-Identifier: Apache-2.0
// A source file that fsdp::compiled adds to a target: engines over ranks that are threads.
#if defined(FSDP_VERSION_NAMESPACE)
#error "compile this file alone: without a precompiled header, and outside of unity builds"
#endif
#define FSDP_DEFINE_BODIES
#include "fsdp/local.hpp"

#if !FSDP_COMPILED
#error "this file is compiled with FSDP_COMPILED=1, as the other files of the target are"
#endif

namespace fsdp::inline FSDP_VERSION_NAMESPACE {
FSDP_LOCAL_INSTANCES(template)
}
