// SPDX-License-Identifier: Apache-2.0
// run_rank on the host, in bf16 with fp32 master weights.
#include "fsdp/communicator.hpp"
#include "fsdp/host.hpp"
#include "llama/layers_host.hpp"
#include "llama/rank.hpp"

namespace transformer {

template int run_rank<fsdp::Bf16>(fsdp::AnyCommunicator<fsdp::host::Device>, Job const&);

}  // namespace transformer
