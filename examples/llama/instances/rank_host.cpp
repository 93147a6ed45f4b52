// SPDX-License-Identifier: Apache-2.0
// run_rank on the host, for all element types: most of what is compiled here depends on none of them.
#include "fsdp/communicator.hpp"
#include "llama/instances/layers_host.hpp"
#include "llama/instances/rank.hpp"

namespace transformer {

template int run_rank<fsdp::Fp32>(fsdp::AnyCommunicator<fsdp::host::Device>, Job const&);
#if TRANSFORMER_HAVE_ONEDNN
template int run_rank<fsdp::Bf16>(fsdp::AnyCommunicator<fsdp::host::Device>, Job const&);
#endif

}  // namespace transformer
