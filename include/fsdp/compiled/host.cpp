// SPDX-License-Identifier: Apache-2.0
// The source file that fsdp::compiled adds to a target: ranks as threads.
#include "fsdp/compiled/local.hpp"
#include "fsdp/format_body.hpp"

#if !FSDP_COMPILED
#error "this file is compiled with FSDP_COMPILED=1, as the other files of the target are"
#endif

namespace fsdp::inline FSDP_VERSION_NAMESPACE {
FSDP_LOCAL_INSTANCES(template)
}
