// SPDX-License-Identifier: Apache-2.0
// The literal order in which a step's gathers, computations and reductions are enqueued.
// skip-sanitizers
#include <fmt/format.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/catch.hpp"
#include "tests/support/counting.hpp"
#include "tests/support/local_run.hpp"

namespace {

using fsdp::UseId;

using Device = fsdp::host::Device;
using Local = fsdp::local::Communicator<Device>;
using Counted = toy::Counting<Local>;
using Order = std::vector<std::string>;

/// Writes down that it computes.
struct Marker {
  std::shared_ptr<toy::Tally> tally;
  std::string unit;
  template <class T>
  struct Params {
    fsdp::Tensor<T, 1> weight;
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor("weight", p.weight, {256});
  }
  void forward(Device::Stream&, Params<float const> const&) const { note("forward"); }
  void backward(Device::Stream&, Params<float const> const&, Params<float> const&) const { note("backward"); }
  void note(std::string pass) const { tally->entries.push_back({"compute", unit, std::move(pass), 0, 1, 0}); }
};

struct Step {
  Order forward, backward;
};

/// The order of a second step over a root, used first and last, and blocks 0, 1, 2; uses are numbered 0 to 4.
/// `prepare(engine)` is called before the engine is sealed.
template <class Prepare>
Step order(fsdp::ShardingStrategy const& strategy, fsdp::EngineOptions options, Prepare prepare) {
  Step result;
  fsdp::local::run(2, Device{}, [&](Local comm) {
    bool const first = comm.rank() == 0;
    auto tally = std::make_shared<toy::Tally>();
    fsdp::Mesh<Counted> mesh(Counted(std::move(comm), tally));
    fsdp::Engine<Counted> engine(mesh, strategy, options);
    std::vector<fsdp::ShardedModule<Marker, fsdp::Engine<Counted>>> modules;
    auto const root = engine.add_unit("root");
    modules.push_back(engine.shard(Marker{tally, "root"}, "ends", root));
    for (std::string const block : {"0", "1", "2"}) modules.push_back(engine.shard(Marker{tally, block}, block));
    modules.push_back(engine.shard(Marker{tally, "root"}, "ends", root));
    prepare(engine);
    fsdp::Sgd sgd(engine);
    for (int step = 0; step < 2; ++step) {
      tally->entries.clear();
      for (auto& module : modules) module.forward();
      for (auto i = modules.size(); i-- > 0;) modules[i].backward();
      sgd.step();
    }
    engine.synchronize();
    if (!first) return;
    for (auto const& entry : tally->entries) {
      auto const operation = entry.operation == "all_gather" ? "gather"
                             : entry.operation == "compute"  ? "compute"
                                                             : "reduce";
      (entry.pass == "forward" ? result.forward : result.backward)
          .push_back(fmt::format("{} {}", operation, entry.unit));
    }
  });
  return result;
}
Step order(fsdp::ShardingStrategy const& strategy, fsdp::EngineOptions options) {
  return order(strategy, options, [](auto&) {});
}

}  // namespace

TEST_CASE("three blocks, prefetch 1: the table of docs/strategies.md") {
  auto const step = order(fsdp::FullShard{}, {});
  CHECK(step.forward == Order{"gather root", "gather 0", "compute root", "gather 1", "compute 0", "gather 2",
                              "compute 1", "compute 2", "compute root"});
  CHECK(step.backward == Order{"compute root", "gather 1", "compute 2", "reduce 2", "gather 0", "compute 1", "reduce 1",
                               "compute 0", "reduce 0", "compute root", "reduce root"});
}

TEST_CASE("three blocks, prefetch 0: each gather before its compute") {
  auto const step = order(fsdp::FullShard{}, {.prefetch = 0});
  CHECK(step.forward == Order{"gather root", "compute root", "gather 0", "compute 0", "gather 1", "compute 1",
                              "gather 2", "compute 2", "compute root"});
  CHECK(step.backward == Order{"compute root", "compute 2", "reduce 2", "gather 1", "compute 1", "reduce 1", "gather 0",
                               "compute 0", "reduce 0", "compute root", "reduce root"});
}

TEST_CASE("three blocks, prefetch 2: two gathers ahead") {
  auto const step = order(fsdp::FullShard{}, {.prefetch = 2});
  CHECK(step.forward == Order{"gather root", "gather 0", "gather 1", "compute root", "gather 2", "compute 0",
                              "compute 1", "compute 2", "compute root"});
  CHECK(step.backward == Order{"gather 1", "compute root", "gather 0", "compute 2", "reduce 2", "compute 1", "reduce 1",
                               "compute 0", "reduce 0", "compute root", "reduce root"});
}

TEST_CASE("backward has a depth of its own") {
  auto const step = order(fsdp::FullShard{}, {.prefetch = 2, .backward_prefetch = 0});
  CHECK(step.forward == order(fsdp::FullShard{}, {.prefetch = 2}).forward);
  CHECK(step.backward == order(fsdp::FullShard{}, {.prefetch = 0}).backward);
}

TEST_CASE("three blocks, nothing kept") {
  auto const step = order(fsdp::FullShard{}, {.keep_last = false, .keep_root = false});
  CHECK(step.forward == Order{"gather root", "gather 0", "compute root", "gather 1", "compute 0", "gather 2",
                              "compute 1", "gather root", "compute 2", "compute root"});
  CHECK(step.backward == Order{"gather root", "gather 2", "compute root", "gather 1", "compute 2", "reduce 2",
                               "gather 0", "compute 1", "reduce 1", "compute 0", "reduce 0", "compute root",
                               "reduce root"});
}

TEST_CASE("without resharding after forward, backward gathers nothing") {
  auto const step = order(fsdp::ShardGradOp{}, {});
  CHECK(step.forward == order(fsdp::FullShard{}, {}).forward);
  CHECK(step.backward == Order{"compute root", "compute 2", "reduce 2", "compute 1", "reduce 1", "compute 0",
                               "reduce 0", "compute root", "reduce root"});
}

TEST_CASE("explicit lists say what is gathered when") {
  auto const step = order(fsdp::FullShard{}, {}, [](auto& engine) {
    engine.set_forward_prefetch(UseId{0}, {UseId{2}, UseId{1}});  // block 1 before block 0
    engine.set_forward_prefetch(UseId{1}, {});
    engine.set_backward_prefetch(UseId{4}, {UseId{1}, UseId{2}});  // block 0 as soon as backward begins
    engine.set_backward_prefetch(UseId{3}, {});
  });
  CHECK(step.forward == Order{"gather root", "gather 1", "gather 0", "compute root", "compute 0", "gather 2",
                              "compute 1", "compute 2", "compute root"});
  CHECK(step.backward == Order{"gather 0", "gather 1", "compute root", "compute 2", "reduce 2", "compute 1", "reduce 1",
                               "compute 0", "reduce 0", "compute root", "reduce root"});
}

TEST_CASE("a cap on gathered-ahead bytes cuts the depth") {
  // Each unit is 256 elements: 1024 bytes.
  auto const one = order(fsdp::FullShard{}, {.prefetch = 1}), none = order(fsdp::FullShard{}, {.prefetch = 0});
  auto const capped = order(fsdp::FullShard{}, {.prefetch = 4, .max_ahead_bytes = 1024});
  CHECK(capped.forward == one.forward);
  // The kept block 2 takes nothing from the cap: block 1 is gathered while the root computes, block 0 not before block
  // 1 is in use.
  CHECK(capped.backward == Order{"gather 1", "compute root", "compute 2", "reduce 2", "gather 0", "compute 1",
                                 "reduce 1", "compute 0", "reduce 0", "compute root", "reduce root"});
  auto const almost = order(fsdp::FullShard{}, {.prefetch = 4, .max_ahead_bytes = 2047});
  CHECK(almost.forward == one.forward);
  auto const two = order(fsdp::FullShard{}, {.prefetch = 4, .max_ahead_bytes = 2048});
  CHECK(two.forward == order(fsdp::FullShard{}, {.prefetch = 2}).forward);
  auto const closed = order(fsdp::FullShard{}, {.prefetch = 4, .max_ahead_bytes = 1023});
  CHECK(closed.forward == none.forward);
  CHECK(closed.backward == none.backward);
}
