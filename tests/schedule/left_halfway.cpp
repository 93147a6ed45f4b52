// SPDX-License-Identifier: Apache-2.0
// A backward pass that is left half-way never reaches a step: all is refused until its gradients are discarded, and
// then nothing of them is left, wherever they had got to.
// skip-sanitizers
#include <fmt/format.h>

#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/catch.hpp"
#include "tests/support/devices.hpp"
#include "tests/support/messages.hpp"
#include "tests/support/ramp.hpp"

namespace {

using fsdp::testing::Ramp;
using fsdp::testing::refusal;
using Delayed = fsdp::testing::DelayDevice<fsdp::host::Device>;

/// Calls before the steps whose result is compared.
struct Before {
  bool waits = false;         ///< a micro-step whose gradients wait for a reduction, or for replicas alone
  int completed = -1;         ///< uses whose backward completes before the pass is left; -1: no such pass
  bool by_exception = false;  ///< it is left by an exception in the next use
  int delay = 0;              ///< microseconds at most, before each copy and kernel
};

/// A backward that an exception leaves. (Ranks are threads, and Catch2's assertions are for one.)
template <class Sharded>
void leave(Sharded& sharded) {
  try {
    sharded.backward(512.0f, [](auto&) { throw std::domain_error("left"); });
  } catch (std::domain_error const&) {
    return;
  }
  throw std::logic_error("the exception did not reach its caller");
}

struct Outcome {
  std::vector<float> weights;
  bool account_restored = true;
};

/// A root that is used first and last, and three layers, whose sizes split buckets and slots unequally.
template <class P, bool Sets>
Outcome train(fsdp::ShardingStrategy const& strategy, int ranks, fsdp::EngineOptions options, Before const& before) {
  Outcome outcome;
  auto const device_of = [&](int rank) { return Delayed({}, static_cast<std::uint64_t>(rank) + 1, before.delay); };
  fsdp::local::run(ranks, device_of, [&](fsdp::local::Communicator<Delayed> comm) {
    using Engine = fsdp::Engine<fsdp::local::Communicator<Delayed>, P>;
    fsdp::Mesh mesh(std::move(comm));
    Engine engine(mesh, strategy, options);
    using Sharded = fsdp::ShardedModule<Ramp<Sets>, Engine>;
    auto const root = engine.add_unit("root");
    std::vector<Sharded> layers;
    layers.push_back(engine.shard(Ramp<Sets>{300}, "tied", root));
    for (std::int64_t const elements : {70, 1000, 5})
      layers.push_back(engine.shard(Ramp<Sets>{elements}, fmt::format("layer.{}", elements)));
    layers.push_back(engine.shard(Ramp<Sets>{300}, "tied", root));
    fsdp::Sgd sgd(engine, {.lr = 0.25f});

    auto const forward = [&] {
      for (auto& layer : layers) layer.forward();
    };
    auto const backward = [&](float by, std::size_t uses) {
      for (auto left = layers.size(); left-- > layers.size() - uses;) layers[left].backward(by);
    };
    engine.synchronize();
    auto const live = engine.account().live(fsdp::MemoryTag::reduce);
    if (before.waits) {
      auto const group_sums_wait = engine.no_replica_sync();
      auto const gradients_wait = engine.no_sync(strategy.shards && !strategy.grouped);
      forward();
      backward(64.0f, layers.size());
    }
    if (before.completed >= 0) {
      auto const completed = static_cast<std::size_t>(before.completed);
      forward();
      backward(512.0f, completed);
      if (before.by_exception) {
        auto& next = layers[layers.size() - 1 - completed];
        leave(next);
      }
    }
    engine.discard_gradients();
    if (engine.account().live(fsdp::MemoryTag::reduce) != live) outcome.account_restored = false;
    for (float const by : {1.0f, 3.0f}) {
      forward();
      backward(by * static_cast<float>(mesh.rank() + 1), layers.size());
      sgd.step();
    }
    auto weights = fsdp::testing::all_weights(engine);
    if (mesh.rank() == 0) outcome.weights = std::move(weights);
  });
  return outcome;
}

template <class P, bool Sets>
void check(fsdp::ShardingStrategy const& strategy, int ranks, fsdp::EngineOptions options, int delay = 0) {
  auto const expected = train<P, Sets>(strategy, ranks, options, {}).weights;
  REQUIRE(expected.size() == 300 + 70 + 1000 + 5);
  REQUIRE(expected[0] == -0.25f * 4.0f * 2.0f * static_cast<float>(ranks + 1) / 2.0f);  // both uses of the tied tensor
  for (int const completed : {-1, 0, 1, 2, 3, 4}) {
    for (bool const waits : {false, true}) {
      bool const by_exception = completed >= 0 && completed % 2 == (waits ? 0 : 1);
      INFO(strategy.name << ", " << ranks << " ranks, " << completed << " uses complete, waits " << waits
                         << ", exception " << by_exception);
      auto const outcome = train<P, Sets>(strategy, ranks, options, {waits, completed, by_exception, delay});
      CHECK(outcome.weights == expected);
      CHECK(outcome.account_restored);
    }
  }
}

}  // namespace

TEST_CASE("discarded gradients leave nothing behind: slots and their zeroes") {
  check<fsdp::Fp32, false>(fsdp::FullShard{}, 3, {.allow_no_sync = true});
  check<fsdp::Fp32, false>(fsdp::FullShard{}, 1, {.allow_no_sync = true});
}
TEST_CASE("discarded gradients leave nothing behind: fresh slots, accumulators in fp32") {
  check<fsdp::Bf16Reduce, true>(fsdp::FullShard{}, 2, {.allow_no_sync = true});
}
TEST_CASE("discarded gradients leave nothing behind: partial sums of a replica") {
  check<fsdp::Fp32, false>(fsdp::HybridShard<>{.group = 2}, 4, {.allow_no_replica_sync = true});
}
TEST_CASE("discarded gradients leave nothing behind: buckets that are under way") {
  // Buckets of 64 elements: parts of the root's and of the large layer's gradients travel while the rest waits.
  check<fsdp::Fp32, false>(fsdp::NoShard{}, 2, {.bucket_bytes = 2800, .first_bucket_bytes = 256}, 1500);
}

TEST_CASE("until its gradients are discarded, all but completing a backward pass is refused, naming its units") {
  using Comm = fsdp::local::Communicator<fsdp::host::Device>;
  for (bool const by_exception : {false, true}) {
    std::vector<std::string> messages;
    std::vector<float> weights;
    fsdp::local::run(2, fsdp::host::Device{}, [&](Comm comm) {
      fsdp::Mesh mesh(std::move(comm));
      fsdp::Engine<Comm> engine(mesh, fsdp::FullShard{});
      auto layers = engine.shard(std::vector<Ramp<>>(3), "layer");
      fsdp::Sgd sgd(engine, {.lr = 1.0f});
      auto const forward = [&] {
        for (auto& layer : layers) layer.forward();
      };
      forward();
      layers[2].backward(1.0f);
      if (by_exception) leave(layers[1]);
      std::vector<std::function<void()>> const refused{
          [&] { layers[0].forward(); },
          [&] { static_cast<void>(engine.evaluation()); },
          [&] { static_cast<void>(fsdp::clip_grad_norm(engine, 1.0f)); },
          [&] { sgd.step(); },
          [&] { fsdp::export_gradients(engine, [](auto&&...) {}); },
          [&] { fsdp::import_shard(engine, [](auto&&...) {}); },
      };
      std::vector<std::string> mine;
      for (auto const& act : refused) mine.push_back(refusal(act));
      if (by_exception) mine.push_back(refusal([&] { layers[1].backward(1.0f); }));
      if (mesh.rank() == 0) messages = mine;
      if (by_exception) {  // the only way on
        engine.discard_gradients();
        forward();
        layers[2].backward(1.0f);
      }  // else nothing has changed, and the pass goes on
      layers[1].backward(1.0f);
      layers[0].backward(1.0f);
      sgd.step();
      auto const all = fsdp::testing::all_weights(engine);
      if (mesh.rank() == 0) weights = all;
    });
    REQUIRE(messages.size() == (by_exception ? 7u : 6u));
    for (auto const& message : messages) {
      INFO(message);
      CHECK(message.find(by_exception ? "an exception has interrupted a backward pass"
                                      : "a backward pass is incomplete") != std::string::npos);
      CHECK(message.find("units that have their gradients: 'layer.2'; units without: 'layer.1', 'layer.0'") !=
            std::string::npos);
      CHECK(message.find("discard_gradients()") != std::string::npos);
    }
    REQUIRE(weights.size() == 15);
    for (std::size_t i = 0; i < weights.size(); ++i) CHECK(weights[i] == -static_cast<float>(i % 5 + 1));
  }
}

TEST_CASE("gradients are not discarded inside a use's backward") {
  using Comm = fsdp::local::Communicator<fsdp::host::Device>;
  std::string message;
  fsdp::local::run(1, fsdp::host::Device{}, [&](Comm comm) {
    fsdp::Mesh mesh(std::move(comm));
    fsdp::Engine<Comm> engine(mesh, fsdp::FullShard{});
    auto layer = engine.shard(Ramp<>{}, "layer");
    layer.forward();
    layer.backward(1.0f, [&](auto&) { message = refusal([&] { engine.discard_gradients(); }); });
  });
  CHECK(message == "rank 0: gradients are discarded, but backward of 'layer' has not ended; end it first");
}

// A case for ThreadSanitizer: the optimizer writes the shards that the gathers of a forgotten pass may still read.
TEST_CASE("a step after a forward pass that was left half-way waits for what was gathered ahead") {
  using Comm = fsdp::local::Communicator<Delayed>;
  auto const device_of = [](int rank) { return Delayed({}, static_cast<std::uint64_t>(rank) + 1, 200); };
  fsdp::local::run(2, device_of, [&](Comm comm) {
    fsdp::Mesh mesh(std::move(comm));
    fsdp::Engine<Comm> engine(mesh, fsdp::FullShard{}, {.prefetch = 2});
    auto layers = engine.shard(std::vector<Ramp<>>(5, Ramp<>{4000}), "layer");
    fsdp::Sgd sgd(engine, {.lr = 0.25f});
    for (bool const evaluates : {false, true}) {
      for (auto& layer : layers) layer.forward();
      for (auto i = layers.size(); i-- > 0;) layers[i].backward(1.0f);
      {
        std::optional<decltype(engine.evaluation())> scope;
        if (evaluates) scope.emplace(engine.evaluation());
        layers[0].forward();
      }
      sgd.step();
    }
    auto const weights = fsdp::testing::all_weights(engine);
    if (mesh.rank() == 0 && weights.at(0) != -0.5f) throw std::logic_error("other weights than of two steps");
  });
}
