// SPDX-License-Identifier: Apache-2.0
// A plan allocates nothing by rank: as many bytes for 64 ranks as for 16,384, and less than 64 MiB.
// skip-sanitizers
#include "tests/support/allocations.hpp"

#include <cstdint>
#include <string>
#include <utility>

#include "fsdp/plan.hpp"
#include "tests/catch.hpp"

namespace plan_allocations {
namespace {

struct Block {
  std::int64_t width;
  template <class T>
  struct Params {
    fsdp::Tensor<T, 2> up, down;
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor("up", p.up, {width, 4 * width});
    tensor("down", p.down, {4 * width, width});
  }
  fsdp::plan::Work work() const { return {{1e12, 1e9}, {2e12, 2e9}}; }
};

/// Bytes that a whole plan of 80 blocks, 70B parameters, allocates, freed ones included.
long of_ranks(int ranks, fsdp::ShardingStrategy const& strategy, double& seconds) {
  fsdp::plan::Hardware hardware;
  hardware.gpus_per_node = 8;
  hardware.flops = hardware.memory_bandwidth = hardware.node_bandwidth = hardware.network_bandwidth = 1e12;
  fsdp::testing::begin_counting();
  fsdp::plan::Declaration<fsdp::Bf16> declared(ranks, strategy);
  for (int i = 0; i < 80; ++i) declared.shard(Block{10'500}, "h." + std::to_string(i));
  auto const input = declared.input();
  auto const program = fsdp::compile_program(input);
  auto const memory = fsdp::memory_plan(program, input);
  seconds = fsdp::plan::forecast(program, input, {declared.work(), 1, false, true}, hardware).step;
  fsdp::testing::end_counting();
  CHECK(memory.rest() > 0);
  return fsdp::testing::allocated_bytes.load();
}

}  // namespace

TEST_CASE("plan: nothing is allocated by rank") {
  for (auto const& strategy : {fsdp::ShardingStrategy(fsdp::FullShard{}), fsdp::ShardingStrategy(fsdp::ShardGradOp{}),
                               fsdp::ShardingStrategy(fsdp::HybridShard<fsdp::FullShard>{8})}) {
    CAPTURE(strategy.name);
    double few{}, many{};
    auto const bytes = of_ranks(64, strategy, few);
    CHECK(bytes < 64 << 20);
    // Spans of time may merge otherwise, and a list of them is then a little longer; a byte a rank would be more.
    CHECK(of_ranks(16'384, strategy, many) < bytes + 16'384);
    CHECK(many > 0);
    CHECK(few > 0);
  }
}

}  // namespace plan_allocations
