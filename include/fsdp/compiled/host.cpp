// SPDX-License-Identifier: Apache-2.0
// The library fsdp::compiled.
#include "fsdp/compiled/local.hpp"
#include "fsdp/format_body.hpp"

#if !FSDP_COMPILED
#error "fsdp::compiled is compiled with FSDP_COMPILED=1, as the files of the program that links it are"
#endif

namespace fsdp {
FSDP_LOCAL_INSTANCES(template)
}
