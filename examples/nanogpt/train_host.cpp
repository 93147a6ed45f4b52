// SPDX-License-Identifier: Apache-2.0
// run_rank for every strategy, on the host: in one file, because engines of different strategies are mostly the same code.
#include "host_world.hpp"
#include "layers_host.hpp"
#include "run_rank.hpp"

namespace nanogpt {

template int run_rank<fsdp::FullShard, fsdp::Fp32>(HostWorld, Job const&);
template int run_rank<fsdp::ShardGradOp, fsdp::Fp32>(HostWorld, Job const&);
template int run_rank<fsdp::HybridShard<>, fsdp::Fp32>(HostWorld, Job const&);
template int run_rank<fsdp::NoShard, fsdp::Fp32>(HostWorld, Job const&);

}  // namespace nanogpt
