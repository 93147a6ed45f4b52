// SPDX-License-Identifier: Apache-2.0
// run_rank on the host.
#include "fsdp/communicator.hpp"
#include "layers_host.hpp"
#include "rank.hpp"

namespace transformer {

template int run_rank<fsdp::Fp32>(fsdp::AnyCommunicator<fsdp::host::Device>, Job const&);

}  // namespace transformer
