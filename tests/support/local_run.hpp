// SPDX-License-Identifier: Apache-2.0
// Runs a test on threads of this process.
#pragma once

#include <mutex>
#include <vector>

#include "fsdp/host.hpp"
#include "fsdp/local.hpp"
#include "tests/support/training.hpp"

namespace toy {

/// Trains on `ranks` threads; `device` may be a test's wrapper. @return rank 0's full parameters
template <class D = fsdp::host::Device>
std::vector<float> train_local(fsdp::ShardingStrategy const& strategy, int ranks, Run const& run,
                               D const& device = {}) {
  std::vector<float> result;
  fsdp::local::run(ranks, device, [&](fsdp::local::Communicator<D> comm) {
    bool const first = comm.rank() == 0;
    auto parameters = train(strategy, std::move(comm), run);
    if (first) result = std::move(parameters);
  });
  return result;
}

}  // namespace toy
