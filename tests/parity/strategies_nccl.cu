// SPDX-License-Identifier: Apache-2.0
// The engine over NCCL, one process per rank: every strategy trains to the host's parameters within fp32 rounding.
// timeout: 470
// nvcc-full
#include <cmath>
#include <vector>

#include "fsdp/cuda.hpp"
#include "fsdp/nccl.hpp"
#include "tests/catch.hpp"
#include "tests/conformance/gpu.hpp"
#include "tests/support/local_run.hpp"

namespace {

constexpr int ranks = 2;
bool const ready = fsdp::testing::need_ranks(ranks);

/// NCCL promises no order of sums, so parameters are compared by norm.
double difference_from_host(fsdp::ShardingStrategy const& strategy, fsdp::nccl::Communicator& world,
                            toy::Run const& run) {
  auto const gpu = toy::train(strategy, world.split(0, world.rank(), "test"), run);
  if (world.rank() != 0) return 0.0;
  auto const host = toy::train_local(strategy, ranks, run);
  double difference = 0.0, norm = 0.0;
  for (std::size_t i = 0; i < host.size(); ++i) {
    difference += std::pow(static_cast<double>(host[i]) - static_cast<double>(gpu[i]), 2);
    norm += std::pow(static_cast<double>(host[i]), 2);
  }
  return gpu.size() == host.size() ? std::sqrt(difference / norm) : INFINITY;
}

}  // namespace

TEST_CASE("SGD over NCCL equals that of the host under every strategy, in symmetric memory too where NCCL has it") {
  static auto world = fsdp::nccl::Communicator::from_environment();
  toy::Run run;
  run.optimizer = toy::Optimizer::sgd;
  run.steps = 20;
  CHECK(difference_from_host(fsdp::FullShard{}, world, run) <= 1e-4);
  CHECK(difference_from_host(fsdp::ShardGradOp{}, world, run) <= 1e-4);
  CHECK(difference_from_host(fsdp::NoShard{}, world, run) <= 1e-4);
  run.shard_group = 1;
  CHECK(difference_from_host(fsdp::HybridShard<>{}, world, run) <= 1e-4);

  fsdp::nccl::Options symmetric;
  symmetric.symmetric_memory = true;
  try {
    auto other = fsdp::nccl::Communicator::from(world, world.device(), symmetric);
    for (fsdp::ShardingStrategy const strategy :
         {fsdp::ShardingStrategy(fsdp::FullShard{}), fsdp::ShardingStrategy(fsdp::NoShard{})})
      CHECK(difference_from_host(strategy, other, run) <= 1e-4);
  } catch (fsdp::ConfigError const& error) {  // an older NCCL, or GPUs between which there is no such memory
    WARN("without symmetric memory: " << error.what());
  }
}
