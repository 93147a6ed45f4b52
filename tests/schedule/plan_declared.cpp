// SPDX-License-Identifier: Apache-2.0
// skip-sanitizers
// A plan without device and communicator reserves, to the byte, what engines on threads do.
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/plan.hpp"
#include "tests/catch.hpp"
#include "tests/support/local_run.hpp"
#include "tests/support/strategies.hpp"

namespace {

using Device = fsdp::host::Device;

/// Bytes of a rank, by tag, and the highest use in a step.
using Bytes = std::vector<std::int64_t>;

template <class P>
Bytes measured(fsdp::ShardingStrategy const& strategy, int ranks, toy::Shape const& shape,
               fsdp::EngineOptions const& options) {
  Bytes bytes;
  using Comm = fsdp::local::Communicator<Device>;
  fsdp::local::run(ranks, Device{}, [&](Comm comm) {
    fsdp::Mesh<Comm> mesh(std::move(comm));
    fsdp::Engine<Comm, P> engine(mesh, strategy, options);
    toy::Network network(engine, shape);
    fsdp::AdamW adamw(engine);
    for (int step = 0; step < 2; ++step) {
      engine.account().reset_peak();
      network.step(step);
      adamw.step();
    }
    using Tag = fsdp::MemoryTag;
    if (engine.rank() != 0) return;
    for (auto const tag : {Tag::parameters, Tag::gradients, Tag::optimizer, Tag::gather, Tag::reduce})
      bytes.push_back(engine.account().reserved(tag));
    bytes.push_back(engine.account().peak_live_state());
  });
  return bytes;
}

/// The modules of toy::Network.
template <class P>
Bytes planned(fsdp::ShardingStrategy const& strategy, int ranks, toy::Shape const& shape,
              fsdp::EngineOptions const& options) {
  using T = typename P::Param;
  fsdp::plan::Declaration<P> declared(ranks, strategy, options);
  auto const root = declared.add_unit("root");
  auto const rows = shape.global_rows / ranks;
  declared.shard(toy::Embed<Device>{{}, rows, shape.inputs, shape.width}, "ends", root);
  for (std::size_t i = 0; i < shape.hidden.size(); ++i)
    declared.shard(toy::Layer<Device, T>{{}, rows, shape.width, shape.hidden[i]}, "layers." + std::to_string(i));
  declared.shard(toy::Head<Device>{{}, rows, shape.inputs, shape.width}, "ends", root);
  auto const plan = fsdp::memory_plan(declared.input());
  return {plan.parameters, plan.gradients, plan.optimizer,
          plan.gather,     plan.reduce,    std::max(plan.live_forward, plan.live_backward)};
}

template <class P>
void compare() {
  toy::Shape shape;
  shape.hidden = {29, 31, 7, 29};
  for (int const ranks : {1, 2, 3, 4})
    for (auto const& strategy : fsdp::testing::strategies_and_groups(ranks))
      for (int const prefetch : {0, 1, 2}) {
        CAPTURE(ranks, strategy.name, prefetch);
        fsdp::EngineOptions const options{.prefetch = prefetch};
        CHECK(planned<P>(strategy, ranks, shape, options) == measured<P>(strategy, ranks, shape, options));
      }
}

}  // namespace

TEST_CASE("plan: declared memory is the account of engines in fp32, every strategy, 1 to 4 ranks") {
  compare<fsdp::Fp32>();
}
TEST_CASE("plan: declared memory is the account of engines in bf16, every strategy, 1 to 4 ranks") {
  compare<fsdp::Bf16>();
}

TEST_CASE("plan: what a declaration says is what the engine says") {
  toy::Shape const shape;
  fsdp::plan::Declaration<> declared(3, fsdp::FullShard{});
  CHECK_THROWS_AS(fsdp::plan::Declaration<>(3, fsdp::HybridShard<fsdp::FullShard>{2}), fsdp::ConfigError);
  declared.shard(toy::Layer<Device>{{}, 4, 5, 6}, "layer");
  CHECK_THROWS_AS(declared.shard(toy::Layer<Device>{{}, 4, 5, 6}, "layer"), fsdp::UsageError);
  auto const input = declared.input();
  REQUIRE(input.units.size() == 1);
  CHECK(input.units[0].name == "layer");
  CHECK(input.uses == std::vector<std::size_t>{0});
  CHECK(declared.work().size() == 1);
}
