// SPDX-License-Identifier: Apache-2.0
// run_rank on a GPU, in bf16 with fp32 master weights.
#include "fsdp/communicator.hpp"
#include "fsdp/cuda.hpp"
#include "llama/layers_cuda.hpp"
#include "llama/rank.hpp"

namespace transformer {

template int run_rank<fsdp::Bf16>(fsdp::AnyCommunicator<fsdp::cuda::Device>, Job const&);

}  // namespace transformer
