// SPDX-License-Identifier: Apache-2.0
// One host thread at a time is inside an engine's calls: a second one gets an error. Handing over between calls is
// fine.
// skip-asan
#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/catch.hpp"
#include "tests/support/ramp.hpp"

namespace {

using fsdp::testing::Ramp;
using Comm = fsdp::local::Communicator<fsdp::host::Device>;
using Engine = fsdp::Engine<Comm>;
using Layers = std::vector<fsdp::ShardedModule<Ramp<>, Engine>>;

/// Runs `act` on another thread, and rethrows nothing: it must not throw.
void elsewhere(std::function<void()> const& act) { std::thread(act).join(); }

}  // namespace

TEST_CASE("of two threads inside calls of one engine, one gets an error that names both calls") {
  // Rank 0's threads both make a call that waits for rank 1, which comes when one of them was refused.
  std::atomic<bool> refused{false};
  std::string message;
  std::atomic<int> through{0};
  fsdp::local::run(2, fsdp::host::Device{}, [&](Comm comm) {
    fsdp::Mesh mesh(std::move(comm));
    Engine engine(mesh, fsdp::FullShard{});
    auto layer = engine.shard(Ramp<>{}, "layer");
    engine.seal();
    if (mesh.rank() == 1) {
      while (!refused) std::this_thread::yield();
      engine.mean_over_ranks({1.0});
      return;
    }
    auto const call = [&] {
      try {
        engine.mean_over_ranks({1.0});
        ++through;
      } catch (fsdp::UsageError const& error) {
        message = error.what();
        refused = true;
      }
    };
    std::thread other(call);
    call();
    other.join();
  });
  CHECK(through == 1);
  CHECK(message ==
        "rank 0: mean_over_ranks is called while another thread is inside a call of this engine (last entered: "
        "mean_over_ranks). Only one host thread at a time may call an engine; other threads may call it when that call "
        "has returned");
}

TEST_CASE("every call is refused while another thread is inside one, and changes nothing") {
  std::vector<std::string> accepted;
  std::size_t asked = 0;
  std::vector<float> weights;
  fsdp::local::run(1, fsdp::host::Device{}, [&](Comm comm) {
    fsdp::Mesh mesh(std::move(comm));
    Engine engine(mesh, fsdp::FullShard{}, {.allow_no_sync = true});
    auto layers = engine.shard(std::vector<Ramp<>>(2), "layer");
    fsdp::Sgd sgd(engine, {.lr = 1.0f});
    fsdp::GradScaler scaler(engine);
    std::vector<std::pair<std::string, std::function<void()>>> const calls{
        {"forward", [&] { layers[0].forward(); }},
        {"backward", [&] { layers[1].backward(1.0f); }},
        {"evaluation", [&] { static_cast<void>(engine.evaluation()); }},
        {"no_sync", [&] { static_cast<void>(engine.no_sync()); }},
        {"discard_gradients", [&] { engine.discard_gradients(); }},
        {"synchronize", [&] { engine.synchronize(); }},
        {"seal", [&] { engine.seal(); }},
        {"on_reduced", [&] { engine.shards().on_reduced(engine.shards()[0], [](auto&, std::span<float>) {}); }},
        {"mean_over_ranks", [&] { static_cast<void>(engine.mean_over_ranks({1.0})); }},
        {"start_trace", [&] { engine.start_trace(10); }},
        {"step", [&] { sgd.step(); }},
        {"steps", [&] { static_cast<void>(sgd.steps()); }},
        {"scaler", [&] { scaler.step(sgd, 1.0f); }},
        {"clip_grad_norm", [&] { static_cast<void>(fsdp::clip_grad_norm(engine, 1.0f)); }},
        {"import_shard", [&] { fsdp::import_shard(engine, [](auto&&...) {}); }},
        {"export_full", [&] { fsdp::export_full(engine, [](auto&&...) {}); }},
    };
    // The callback of an export runs inside it.
    fsdp::export_full(engine, [&](fsdp::TensorInfo const& tensor, std::span<float const>) {
      if (tensor.name != "layer.0.w") return;
      elsewhere([&] {
        for (auto const& [name, call] : calls) {
          ++asked;
          try {
            call();
            accepted.push_back(name);
          } catch (fsdp::UsageError const& error) {
            if (std::string(error.what()).find("another thread is inside a call") == std::string::npos)
              accepted.push_back(name + ": " + error.what());
          }
        }
      });
    });
    for (auto& layer : layers) layer.forward();
    for (auto i = layers.size(); i-- > 0;) layers[i].backward(1.0f);
    scaler.step(sgd, 1.0f);
    weights = fsdp::testing::all_weights(engine);
  });
  CHECK(accepted == std::vector<std::string>{});
  CHECK(asked == 16);
  REQUIRE(weights.size() == 10);
  CHECK(weights[1] < 0.0f);
}

TEST_CASE("an engine is handed over between calls, and between the two ends of a use") {
  std::vector<std::vector<float>> weights(2);
  for (bool const over : {false, true}) {
    fsdp::local::run(2, fsdp::host::Device{}, [&](Comm comm) {
      fsdp::Mesh mesh(std::move(comm));
      Engine engine(mesh, fsdp::FullShard{});
      auto layers = engine.shard(std::vector<Ramp<>>(2), "layer");
      fsdp::Sgd sgd(engine, {.lr = 1.0f});
      auto const act = [&](std::function<void()> const& what) { over ? elsewhere(what) : what(); };
      for (int step = 0; step < 3; ++step) {
        for (auto& layer : layers) act([&] { layer.forward(); });
        for (auto i = layers.size(); i-- > 0;) act([&] { layers[i].backward(1.0f); });
        act([&] { sgd.step(); });
      }
      std::optional<Engine::Evaluation> evaluation;
      act([&] { evaluation.emplace(engine.evaluation()); });
      std::unique_ptr<Engine::Scope> use;
      act([&] { use.reset(new Engine::Scope(engine.forward_scope(layers[0]))); });
      act([&] { use.reset(); });
      act([&] { evaluation.reset(); });
      auto const all = fsdp::testing::all_weights(engine);
      if (mesh.rank() == 0) weights[over ? 1 : 0] = all;
    });
  }
  REQUIRE(weights[0].size() == 10);
  CHECK(weights[0] == weights[1]);
}

TEST_CASE("an engine refuses the uses and units of another one") {
  fsdp::local::run(1, fsdp::host::Device{}, [&](Comm comm) {
    fsdp::Mesh mesh(std::move(comm));
    Engine one(mesh, fsdp::FullShard{}), two(mesh, fsdp::FullShard{});
    auto const foreign_unit = two.add_unit("shared");
    auto first = one.shard(Ramp<>{}, "first"), second = one.shard(Ramp<>{}, "second");
    auto other = two.shard(Ramp<>{}, "other", foreign_unit);
    auto const refused = [&](std::function<void()> const& act) {
      try {
        act();
      } catch (fsdp::UsageError const& error) {
        return std::string(error.what());
      }
      return std::string();
    };
    CHECK(refused([&] { one.shard(Ramp<>{}, "third", foreign_unit); }) ==
          "rank 0: the unit of module 'third' belongs to another engine; pass an id that this engine has returned");
    auto const use = "rank 0: a use id belongs to another engine; pass an id that this engine has returned";
    CHECK(refused([&] { one.set_forward_prefetch(first, {other}); }) == use);
    CHECK(refused([&] { one.set_backward_prefetch(other, {}); }) == use);
    CHECK(refused([&] { auto const scope = one.forward_scope(other); }) == use);
    first.forward();
    second.forward();
    CHECK(refused([&] { auto const scope = one.backward_scope(other); }) == use);
    second.backward(1.0f);
    first.backward(1.0f);
  });
}
