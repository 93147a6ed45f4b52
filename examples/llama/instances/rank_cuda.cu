// SPDX-License-Identifier: Apache-2.0
// run_rank on a GPU, for all element types: most of what is compiled here depends on none of them.
#include "fsdp/communicator.hpp"
#include "fsdp/cuda.hpp"
#include "llama/instances/layers_cuda.hpp"
#include "llama/instances/rank.hpp"

namespace transformer {

template int run_rank<fsdp::Fp32>(fsdp::AnyCommunicator<fsdp::cuda::Device>, Job const&);
template int run_rank<fsdp::Bf16>(fsdp::AnyCommunicator<fsdp::cuda::Device>, Job const&);

}  // namespace transformer
