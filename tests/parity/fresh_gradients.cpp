// SPDX-License-Identifier: Apache-2.0
// Modules that begin the sums of their gradients themselves: nothing is zeroed for them, and not a bit differs.
// skip-sanitizers
#include <cstring>
#include <memory>
#include <vector>

#include "tests/catch.hpp"
#include "tests/support/devices.hpp"
#include "tests/support/local_run.hpp"

namespace {

using toy::Setting;

/// Hands out memory full of NaN: whatever is read before it was written shows.
struct Poison : fsdp::testing::Forward<fsdp::host::Device> {
  void* allocate(std::size_t bytes) const {
    void* const memory = base.allocate(bytes);
    if (bytes > 0) std::memset(memory, 0xff, bytes);
    return memory;
  }
};

bool equal_bits(std::vector<float> const& a, std::vector<float> const& b) {
  return !a.empty() && a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void check_settings(fsdp::ShardingStrategy const& strategy, int ranks, toy::Run run) {
  INFO(strategy.name << ", " << ranks << " ranks, " << run.micro_steps << " micro-steps"
                     << (run.sync_last_only ? ", reduced once" : ""));
  run.steps = 4;
  run.shape.setting = Setting::none;
  auto const expected = toy::train_local(strategy, ranks, run);
  for (auto const setting : {Setting::every, Setting::ends, Setting::even_layers}) {
    INFO("setting " << static_cast<int>(setting));
    run.shape.setting = setting;
    CHECK(equal_bits(toy::train_local(strategy, ranks, run, Poison{}), expected));
  }
}

void check_accumulation(fsdp::ShardingStrategy const& strategy, int ranks, toy::Run run) {
  check_settings(strategy, ranks, run);
  run.micro_steps = 3;
  check_settings(strategy, ranks, run);
  run.sync_last_only = run.options.allow_no_sync = true;
  check_settings(strategy, ranks, run);
}

/// Bytes, over all ranks.
struct Zeroed {
  std::int64_t in_a_step = 0;  ///< by one training step after the first, without clipping
  std::int64_t padding = 0, gradients = 0;
};

Zeroed zeroed(fsdp::ShardingStrategy const& strategy, int ranks, Setting setting) {
  using Device = fsdp::testing::CountDevice<fsdp::host::Device>;
  using Comm = fsdp::local::Communicator<Device>;
  Zeroed result;
  Device const device;
  fsdp::local::run(ranks, device, [&](Comm comm) {
    fsdp::Mesh<Comm> mesh(std::move(comm));
    fsdp::Engine<Comm> engine(mesh, strategy);
    toy::Shape shape;
    shape.setting = setting;
    toy::Network network(engine, shape);
    fsdp::Sgd sgd(engine, {.lr = 0.1f});
    Zeroed mine;
    for (int step = 0; step < 2; ++step) {
      engine.synchronize();
      static_cast<void>(engine.world().exchange({}, "before"));
      auto const before = device.counts->zeroed_bytes.load();
      static_cast<void>(engine.world().exchange({}, "begin"));
      network.step(step);
      sgd.step();
      engine.synchronize();
      static_cast<void>(engine.world().exchange({}, "after"));
      mine.in_a_step = device.counts->zeroed_bytes.load() - before;
      static_cast<void>(engine.world().exchange({}, "end"));
    }
    for (std::size_t u = 0; u < engine.shards().size(); ++u) {
      auto const& layout = engine.shards()[u].layout();
      mine.padding += ranks * (layout.padded() - layout.numel()) * 4;
      mine.gradients += ranks * layout.padded() * 4;
    }
    if (mesh.rank() == 0) result = mine;
  });
  return result;
}

void check_zeroed(fsdp::ShardingStrategy const& strategy, int ranks) {
  INFO(strategy.name << ", " << ranks << " ranks");
  auto const every = zeroed(strategy, ranks, Setting::every);
  CHECK(every.padding > 0);
  CHECK(every.in_a_step == every.padding);
  CHECK(zeroed(strategy, ranks, Setting::none).in_a_step >= every.gradients);
}

}  // namespace

TEST_CASE("gradients that modules set are those that they add to zeros, bit by bit") {
  int const ranks = GENERATE(1, 2, 4);
  toy::Run run;
  check_accumulation(fsdp::FullShard{}, ranks, run);
  check_accumulation(fsdp::ShardGradOp{}, ranks, run);
  check_accumulation(fsdp::NoShard{}, ranks, run);
  if (ranks < 4) return;
  run.shard_group = 2;
  check_accumulation(fsdp::HybridShard<>{}, ranks, run);
  run.options.allow_no_replica_sync = true;
  check_accumulation(fsdp::HybridShard<>{}, ranks, run);
}

TEST_CASE("nothing but padding is zeroed in a step where all modules set their gradients") {
  int const ranks = GENERATE(1, 2);
  check_zeroed(fsdp::FullShard{}, ranks);
  check_zeroed(fsdp::ShardGradOp{}, ranks);
  check_zeroed(fsdp::NoShard{}, ranks);
}
