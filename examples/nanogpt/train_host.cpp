// SPDX-License-Identifier: Apache-2.0
// run_rank on the host.
#include "host_world.hpp"
#include "layers_host.hpp"
#include "run_rank.hpp"

namespace nanogpt {

template int run_rank<fsdp::Fp32>(HostWorld, Job const&);

}  // namespace nanogpt
