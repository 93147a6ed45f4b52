// SPDX-License-Identifier: Apache-2.0
// An optimizer that throws between two units leaves parameters torn: all is refused until they are replaced.
//
// skip-tsan
#include <functional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/catch.hpp"
#include "tests/support/messages.hpp"
#include "tests/support/ramp.hpp"

namespace {

using fsdp::testing::Ramp;
using fsdp::testing::refusal;
using Comm = fsdp::local::Communicator<fsdp::host::Device>;
using Engine = fsdp::Engine<Comm>;
using Layers = std::vector<fsdp::ShardedModule<Ramp<>, Engine>>;

/// weight -= gradient, on the host. Throws before it updates unit `until`.
void step(Engine& engine, std::size_t until) {
  auto const shards = engine.shards();
  shards.begin_step("Halting", 1.0f);
  for (std::size_t u = 0; u < shards.size(); ++u) {
    auto& unit = shards[u];
    if (u == until) throw std::domain_error("halts");
    auto const update = shards.update(unit);
    engine.compute().enqueue([to = unit.master, from = unit.gradient, n = unit.shard_numel()] {
      for (std::int64_t i = 0; i < n; ++i) to[i] -= from[i];
    });
  }
}

void pass(Layers& layers) {
  for (auto& layer : layers) layer.forward();
  for (auto i = layers.size(); i-- > 0;) layers[i].backward(1.0f);
}

void import_zeroes(Engine& engine) {
  fsdp::import_shard(engine, [](fsdp::TensorInfo const&, std::int64_t, std::span<float> out) {
    for (auto& each : out) each = 0.0f;
  });
}

}  // namespace

TEST_CASE("after a step that throws between two units, all but replacing the parameters is refused") {
  for (fsdp::ShardingStrategy const& strategy :
       std::vector<fsdp::ShardingStrategy>{fsdp::FullShard{}, fsdp::NoShard{}}) {
    std::vector<std::string> messages;
    std::vector<float> weights;
    fsdp::local::run(2, fsdp::host::Device{}, [&](Comm comm) {
      fsdp::Mesh mesh(std::move(comm));
      Engine engine(mesh, strategy);
      auto layers = engine.shard(std::vector<Ramp<>>(3), "layer");
      engine.shards().attach_optimizer();
      pass(layers);
      step(engine, 3);  // whole
      pass(layers);
      try {
        step(engine, 2);
      } catch (std::domain_error const&) {
      }
      std::vector<std::string> mine;
      for (auto const& act : std::vector<std::function<void()>>{
               [&] { layers[0].forward(); },
               [&] { static_cast<void>(engine.evaluation()); },
               [&] { static_cast<void>(fsdp::clip_grad_norm(engine, 1.0f)); },
               [&] { step(engine, 3); },
               [&] { fsdp::export_full(engine, [](auto&&...) {}); },
               [&] { fsdp::export_gradients(engine, [](auto&&...) {}); },
               [&] { engine.discard_gradients(); },
           })
        mine.push_back(refusal(act));
      import_zeroes(engine);  // the way on
      engine.discard_gradients();
      pass(layers);
      step(engine, 3);
      auto const all = fsdp::testing::all_weights(engine);
      if (mesh.rank() == 0) messages = mine, weights = all;
    });
    REQUIRE(messages.size() == 7);
    for (auto const& message : messages) {
      INFO(message);
      CHECK(message.find("but an optimizer step is incomplete: units updated: 'layer.0', 'layer.1'; not updated: "
                         "'layer.2'") != std::string::npos);
      CHECK(message.find("Load a checkpoint, or import all parameters") != std::string::npos);
    }
    REQUIRE(weights.size() == 15);
    for (std::size_t i = 0; i < weights.size(); ++i) CHECK(weights[i] == -static_cast<float>(i % 5 + 1));
  }
}

TEST_CASE("an import whose reader throws leaves parameters torn, and another one mends them") {
  fsdp::local::run(2, fsdp::host::Device{}, [&](Comm comm) {
    fsdp::Mesh mesh(std::move(comm));
    Engine engine(mesh, fsdp::NoShard{});
    auto layers = engine.shard(std::vector<Ramp<>>(2), "layer");
    try {
      fsdp::import_shard(engine, [](fsdp::TensorInfo const& tensor, std::int64_t, std::span<float>) {
        if (tensor.name == "layer.1.w") throw std::domain_error("no such file");
      });
    } catch (std::domain_error const&) {
    }
    auto const message = refusal([&] { layers[0].forward(); });
    if (message.find("but an import is incomplete") == std::string::npos) throw std::logic_error(message);
    import_zeroes(engine);
    pass(layers);
  });
}

TEST_CASE("nothing is exported inside a use or an evaluation") {
  std::vector<std::string> messages;
  fsdp::local::run(1, fsdp::host::Device{}, [&](Comm comm) {
    fsdp::Mesh mesh(std::move(comm));
    Engine engine(mesh, fsdp::FullShard{});
    auto layer = engine.shard(Ramp<>{}, "layer");
    auto const exported = [&] { messages.push_back(refusal([&] { fsdp::export_full(engine, [](auto&&...) {}); })); };
    layer.forward([&](auto&) { exported(); });
    layer.backward(1.0f, [&](auto&) { exported(); });
    {
      auto const scope = engine.evaluation();
      exported();
    }
    exported();
  });
  REQUIRE(messages.size() == 4);
  CHECK(messages[0] == "rank 0: parameters are to be exported, but forward of 'layer' has not ended; end it first");
  CHECK(messages[1] == "rank 0: parameters are to be exported, but backward of 'layer' has not ended; end it first");
  CHECK(messages[2] == "rank 0: parameters are to be exported inside an evaluation; end the evaluation scope first");
  CHECK(messages[3].empty());
}

TEST_CASE(
    "updates belong to a step, once for each unit; nothing is measured, stepped or written before the engine is "
    "sealed") {
  fsdp::local::run(2, fsdp::host::Device{}, [&](Comm comm) {
    fsdp::Mesh mesh(std::move(comm));
    Engine engine(mesh, fsdp::NoShard{}), other(mesh, fsdp::NoShard{});
    auto layers = engine.shard(std::vector<Ramp<>>(2), "layer");
    auto others = other.shard(std::vector<Ramp<>>(2), "other");
    auto const shards = engine.shards();
    auto const expect = [&](std::function<void()> const& act, std::string const& part) {
      auto const what = refusal(act);
      if (what.find(part) == std::string::npos) throw std::logic_error("expected '" + part + "', got '" + what + "'");
    };
    expect([&] { static_cast<void>(fsdp::clip_grad_norm(engine, 1.0f)); }, "'layer.0' has no reduced gradients");
    expect([&] { shards.begin_step("Early", 1.0f); }, "'layer.0' has no reduced gradients");
    expect([&] { fsdp::export_gradients(engine, [](auto&&...) {}); }, "'layer.0' has no reduced gradients");
    expect([&] { static_cast<void>(shards.write(shards[0])); }, "before the engine is sealed");
    shards.attach_optimizer();
    other.shards().attach_optimizer();
    pass(layers);
    expect([&] { static_cast<void>(shards.update(shards[0])); }, "'layer.0' outside a step");
    shards.begin_step("Twice", 1.0f);
    { auto const update = shards.update(shards[0]); }
    expect([&] { static_cast<void>(shards.update(shards[0])); }, "'layer.0' was already updated in this step");
    expect([&] { static_cast<void>(shards.update(other.shards()[1])); }, "'other.1' belongs to another engine");
    { auto const update = shards.update(shards[1]); }
    expect([&] { static_cast<void>(shards.update(shards[1])); }, "'layer.1' outside a step");
    pass(layers);
  });
}
