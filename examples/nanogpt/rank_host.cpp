// SPDX-License-Identifier: Apache-2.0
// run_rank on the host.
#include "layers_host.hpp"
#include "rank.hpp"
#include "transformer/launch/world.hpp"

namespace transformer {

template int run_rank<fsdp::Fp32>(World<fsdp::host::Device>, Job const&);

}  // namespace transformer
