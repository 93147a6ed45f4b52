// SPDX-License-Identifier: Apache-2.0
// A plan allocates nothing by rank: as often, and as many bytes, for 16 ranks as for 16,384.
// skip-sanitizers
#include "tests/support/allocations.hpp"

#include <cstdint>
#include <string>
#include <utility>

#include "fsdp/plan/declaration.hpp"
#include "fsdp/plan/forecast.hpp"
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
  void forward(fsdp::host::Device::Stream&, Params<float const> const&) const {}
  template <class G>
  void backward(fsdp::host::Device::Stream&, Params<float const> const&, G const&) const {}
};

/// Number of allocations of a whole plan of 80 blocks, 70B parameters.
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
  auto const count = fsdp::testing::end_counting();
  CHECK(memory.rest() > 0);
  return count;
}

}  // namespace

TEST_CASE("plan: nothing is allocated by rank") {
  for (auto const& strategy : {fsdp::ShardingStrategy(fsdp::FullShard{}), fsdp::ShardingStrategy(fsdp::ShardGradOp{}),
                               fsdp::ShardingStrategy(fsdp::HybridShard<fsdp::FullShard>{8})}) {
    CAPTURE(strategy.name);
    double few{}, many{};
    auto const allocations = of_ranks(64, strategy, few);
    CHECK(of_ranks(16'384, strategy, many) == allocations);
    CHECK(allocations < 100'000);
    CHECK(many > 0);
  }
}

}  // namespace plan_allocations
