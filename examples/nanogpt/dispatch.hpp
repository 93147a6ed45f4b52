// SPDX-License-Identifier: Apache-2.0
// From the name of a strategy to its type, and from a job to ranks that are threads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <utility>
#include <vector>

#include "fsdp/comm/local.hpp"
#include "fsdp/strategy.hpp"
#include "train.hpp"

namespace nanogpt {

template <class C>
int dispatch(C world, Job const& job) {
  auto const& strategy = job.settings.strategy;
  if (strategy == fsdp::FullShard::name) return run_rank<fsdp::FullShard>(std::move(world), job);
  if (strategy == fsdp::ShardGradOp::name) return run_rank<fsdp::ShardGradOp>(std::move(world), job);
  if (strategy == fsdp::HybridShard<>::name) return run_rank<fsdp::HybridShard<>>(std::move(world), job);
  return run_rank<fsdp::NoShard>(std::move(world), job);  // no_shard, ddp
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
