// SPDX-License-Identifier: Apache-2.0
// run_rank for every strategy, on a GPU, in bf16 with fp32 master weights: in one file, because engines of different strategies are
// mostly the same code.
#include "fsdp/comm/local.hpp"
#include "fsdp/cuda/device.hpp"
#include "layers_cuda.hpp"
#include "run_rank.hpp"

namespace nanogpt {

template int run_rank<fsdp::FullShard, fsdp::Bf16>(fsdp::local::Communicator<fsdp::cuda::Device>, Job const&);
template int run_rank<fsdp::ShardGradOp, fsdp::Bf16>(fsdp::local::Communicator<fsdp::cuda::Device>, Job const&);
template int run_rank<fsdp::HybridShard<>, fsdp::Bf16>(fsdp::local::Communicator<fsdp::cuda::Device>, Job const&);
template int run_rank<fsdp::NoShard, fsdp::Bf16>(fsdp::local::Communicator<fsdp::cuda::Device>, Job const&);

}  // namespace nanogpt
