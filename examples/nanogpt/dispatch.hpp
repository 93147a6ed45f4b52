// SPDX-License-Identifier: Apache-2.0
// From the names of a strategy and an element type to types, and from a job to ranks that are threads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/comm/local.hpp"
#include "fsdp/host/device.hpp"
#include "fsdp/strategy.hpp"
#include "host_world.hpp"
#include "train.hpp"

namespace nanogpt {

template <class P, class C>
int dispatch_strategy(C world, Job const& job) {
  auto const& strategy = job.settings.strategy;
  if (strategy == fsdp::FullShard::name) return run_rank<fsdp::FullShard, P>(std::move(world), job);
  if (strategy == fsdp::ShardGradOp::name) return run_rank<fsdp::ShardGradOp, P>(std::move(world), job);
  if (strategy == fsdp::HybridShard<>::name) return run_rank<fsdp::HybridShard<>, P>(std::move(world), job);
  return run_rank<fsdp::NoShard, P>(std::move(world), job);  // no_shard, ddp
}

/// The host computes in fp32 alone.
template <class C>
int dispatch(C world, Job const& job) {
  if constexpr (std::is_same_v<typename C::Device, fsdp::host::Device>) {
    return dispatch_strategy<fsdp::Fp32>(HostWorld::of(std::move(world)), job);
  } else {
    if (job.dtype == "bfloat16") return dispatch_strategy<fsdp::Bf16>(std::move(world), job);
    return dispatch_strategy<fsdp::Fp32>(std::move(world), job);
  }
}

/// Runs the job's ranks as threads of this process, all on `device`. @return the highest exit code
template <class Device>
int run_threads(Job const& job, Device const& device) {
  std::vector<int> codes(static_cast<std::size_t>(job.settings.ranks), EXIT_FAILURE);
  fsdp::local::run(static_cast<int>(job.settings.ranks), device, [&](fsdp::local::Communicator<Device> world) {
    auto& code = codes[static_cast<std::size_t>(world.rank())];
    code = dispatch(std::move(world), job);
  });
  return *std::max_element(codes.begin(), codes.end());
}

}  // namespace nanogpt
