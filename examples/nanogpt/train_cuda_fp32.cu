// SPDX-License-Identifier: Apache-2.0
// run_rank for every strategy, on a GPU, in fp32: in one file, because engines of different strategies are
// mostly the same code.
#include "fsdp/comm/local.hpp"
#include "fsdp/cuda/device.hpp"
#include "layers_cuda.hpp"
#include "run_rank.hpp"

namespace nanogpt {

template int run_rank<fsdp::FullShard, fsdp::Fp32>(fsdp::local::Communicator<fsdp::cuda::Device>, Job const&);
template int run_rank<fsdp::ShardGradOp, fsdp::Fp32>(fsdp::local::Communicator<fsdp::cuda::Device>, Job const&);
template int run_rank<fsdp::HybridShard<>, fsdp::Fp32>(fsdp::local::Communicator<fsdp::cuda::Device>, Job const&);
template int run_rank<fsdp::NoShard, fsdp::Fp32>(fsdp::local::Communicator<fsdp::cuda::Device>, Job const&);

}  // namespace nanogpt
