// SPDX-License-Identifier: Apache-2.0
// When a run is not saved, and how it goes on from there.
// needs: nlohmann_json xxHash
// skip-tsan
#include <cstddef>
#include <filesystem>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "fsdp/checkpoint.hpp"
#include "tests/catch.hpp"
#include "tests/support/messages.hpp"
#include "tests/support/ramp.hpp"
#include "tests/support/temporary_folder.hpp"

namespace {

namespace fs = std::filesystem;
using fsdp::testing::Ramp;
using fsdp::testing::refusal;
using fsdp::testing::TemporaryFolder;
using Comm = fsdp::local::Communicator<fsdp::host::Device>;
using Engine = fsdp::Engine<Comm>;

/// An optimizer that throws before its second unit if it is told to, as one does that runs out of memory.
struct Halting {
  Engine* engine;
  bool halts = false;

  static constexpr std::string_view name() { return "Halting"; }
  static std::vector<std::string_view> state_names() { return {}; }
  static float* state(std::size_t, std::size_t) { return nullptr; }
  static std::int64_t steps() { return 0; }
  static void set_steps(std::int64_t) {}
  void step() const {
    auto const shards = engine->shards();
    shards.begin_step("Halting", 1.0f);
    for (std::size_t u = 0; u < shards.size(); ++u) {
      if (u == 1 && halts) throw std::domain_error("halts");
      auto const update = shards.update(shards[u]);
    }
  }
};

}  // namespace

TEST_CASE("a run is not saved inside a use, inside an evaluation, or after half a step") {
  TemporaryFolder const folder;
  std::vector<std::string> messages;
  fsdp::local::run(2, fsdp::host::Device{}, [&](Comm comm) {
    fsdp::Mesh mesh(std::move(comm));
    Engine engine(mesh, fsdp::FullShard{});
    auto layers = engine.shard(std::vector<Ramp<>>(2), "layer");
    Halting optimizer{&engine};
    engine.shards().attach_optimizer();
    fsdp::BackgroundSaver saver(engine);
    std::vector<std::string> mine;
    auto const saved = [&] {
      mine.push_back(refusal([&] { fsdp::save(engine, optimizer, folder.path, nullptr, {.step = 1}); }));
      mine.push_back(refusal([&] { saver.save(optimizer, folder.path, nullptr, {.step = 2}); }));
    };
    layers[0].forward([&](auto&) { saved(); });
    layers[1].forward();
    layers[1].backward(1.0f, [&](auto&) { saved(); });
    layers[0].backward(1.0f);
    {
      auto const scope = engine.evaluation();
      saved();
    }
    optimizer.halts = true;
    try {
      optimizer.step();
    } catch (std::domain_error const&) {
    }
    saved();
    if (mesh.rank() == 0) messages = mine;
  });
  REQUIRE(messages.size() == 8);
  std::vector<std::string> const expected{
      "rank 0: a checkpoint is to be saved, but forward of 'layer.0' has not ended; end it first",
      "rank 0: a checkpoint is to be saved, but backward of 'layer.1' has not ended; end it first",
      "rank 0: a checkpoint is to be saved inside an evaluation; end the evaluation scope first",
      "rank 0: a checkpoint is to be saved, but an optimizer step is incomplete: units updated: 'layer.0'; not "
      "updated: 'layer.1'. Load a checkpoint, or import all parameters, on all ranks"};
  for (std::size_t i = 0; i < messages.size(); ++i) CHECK(messages[i] == expected[i / 2]);
  CHECK(fs::is_empty(folder.path));
}

TEST_CASE("a load goes on after half a step") {
  TemporaryFolder const folder;
  std::vector<float> weights;
  fsdp::local::run(2, fsdp::host::Device{}, [&](Comm comm) {
    fsdp::Mesh mesh(std::move(comm));
    Engine engine(mesh, fsdp::FullShard{});
    auto layers = engine.shard(std::vector<Ramp<>>(2), "layer");
    fsdp::Sgd sgd(engine, {.lr = 1.0f});
    auto const pass = [&] {
      for (auto& layer : layers) layer.forward();
      for (auto i = layers.size(); i-- > 0;) layers[i].backward(1.0f);
    };
    pass();
    sgd.step();
    auto const place = fsdp::save(engine, sgd, folder.path);
    pass();
    try {
      Halting{&engine, true}.step();
    } catch (std::domain_error const&) {
    }
    fsdp::load(engine, sgd, place);
    pass();
    sgd.step();
    auto const all = fsdp::testing::all_weights(engine);
    if (mesh.rank() == 0) weights = all;
  });
  REQUIRE(weights.size() == 10);
  for (std::size_t i = 0; i < weights.size(); ++i) CHECK(weights[i] == -2.0f * static_cast<float>(i % 5 + 1));
}

TEST_CASE("modules without parameters leave no trace in a checkpoint") {
  TemporaryFolder const folder;
  std::vector<float> weights;
  fs::path place;
  for (bool const relu : {true, false}) {
    fsdp::local::run(2, fsdp::host::Device{}, [&](Comm comm) {
      fsdp::Mesh mesh(std::move(comm));
      Engine engine(mesh, fsdp::FullShard{});
      std::vector<fsdp::AdoptedUnit<Engine>> units;
      float *w = nullptr, *g = nullptr;
      if (relu)
        units.emplace_back(engine, "relu", std::vector<fsdp::AdoptedUnit<Engine>::Tensor>{},
                           fsdp::AdoptedOptions{.kernels_are_enqueued = true});
      units.emplace_back(engine, "fc", std::vector<fsdp::AdoptedUnit<Engine>::Tensor>{{"fc.w", &w, &g, {100}}},
                         fsdp::AdoptedOptions{.kernels_are_enqueued = true});
      if (relu) {
        fsdp::import_shard(engine, [](fsdp::TensorInfo const&, std::int64_t first, std::span<float> out) {
          for (auto& each : out) each = static_cast<float>(first++);
        });
        auto const saved = fsdp::save(engine, folder.path, nullptr, {.step = 1});
        if (mesh.rank() == 0) place = saved;
      } else {
        fsdp::load(engine, place);
        auto const all = fsdp::testing::all_weights(engine);
        if (mesh.rank() == 0) weights = all;
      }
    });
  }
  REQUIRE(weights.size() == 100);
  for (std::size_t i = 0; i < weights.size(); ++i) CHECK(weights[i] == static_cast<float>(i));
}
