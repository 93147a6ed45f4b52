// SPDX-License-Identifier: Apache-2.0
// run_rank on the host, in fp32.
#include "fsdp/communicator.hpp"
#include "fsdp/host.hpp"
#include "llama/layers_host.hpp"
#include "llama/rank.hpp"

namespace transformer {

template int run_rank<fsdp::Fp32>(fsdp::AnyCommunicator<fsdp::host::Device>, Job const&);

}  // namespace transformer
