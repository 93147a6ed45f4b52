// SPDX-License-Identifier: Apache-2.0
// Memory and reductions of a Llama: plan and account agree to the byte, and only tensors that train have gradients.
//
// links: llama_layers_host
// skip-sanitizers
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/detail/step/check_program.hpp"
#include "tests/catch.hpp"
#include "tests/llama/golden_run.hpp"
#include "tests/nanogpt/model_support.hpp"

namespace {

using llama_golden::adapters;
using llama_golden::frozen;
using llama_golden::Run;

struct Sizes {
  std::int64_t planned = 0, reserved = 0;  ///< of the engine
  std::int64_t planned_peak = 0, peak = 0;
  std::int64_t activations = 0;
  std::int64_t reduced = 0, trained = 0;      ///< bytes a rank
  std::int64_t gathered = 0, parameters = 0;  ///< in a forward pass; of whole units
  std::vector<std::string> units;
};

/// Results of rank 0, in the third step.
Sizes sizes_of(Run const& run) {
  Sizes sizes;
  fsdp::local::run(run.ranks, fsdp::host::Device{}, [&](auto comm) {
    llama_golden::Model<fsdp::Fp32> model(std::move(comm), run);
    auto& engine = model.engine();
    Sizes mine;
    fsdp::AdamW adamw(engine, llama_golden::adamw_options);
    auto& account = engine.account();
    for (std::size_t step = 0; step < 3; ++step) {
      account.reset_peak();
      model.forward_backward(step);
      mine.peak = account.peak_live_state();
      adamw.step(fsdp::clip_grad_norm(engine, llama_golden::clip));
    }
    auto const plan = fsdp::memory_plan(engine.plan_input());
    mine.planned = plan.reserved();
    mine.planned_peak = std::max(plan.live_forward, plan.live_backward);
    mine.reserved = account.reserved_state();
    mine.activations = account.reserved(fsdp::MemoryTag::activations);
    auto const forward = count(engine.program(), fsdp::PassKind::forward, fsdp::plain_step);
    auto const backward = count(engine.program(), fsdp::PassKind::backward, fsdp::plain_step);
    mine.gathered = forward.all_gather.bytes;
    mine.reduced = backward.reduce_scatter.bytes;
    for (std::size_t u = 0; u < engine.shards().size(); ++u) {
      auto const& unit = engine.shards()[u];
      if (unit.trains()) mine.trained += unit.shard_numel() * 4;
      mine.parameters += unit.full_numel() * 4;
      mine.units.push_back(unit.name());
    }
    if (engine.rank() == 0) sizes = std::move(mine);
  });
  return sizes;
}

}  // namespace

TEST_CASE("plan and account of a Llama agree, and only what trains is reduced", "[llama][memory]") {
  for (std::string_view const shape : {"grouped", "llama3"}) {
    auto const whole = sizes_of({.shape = shape, .ranks = 2});
    CHECK(2 * whole.trained == whole.parameters);
    for (auto const& tuning :
         {transformer::Tuning{}, adapters(), adapters({"q_proj", "down_proj"}), frozen(1), frozen(2)}) {
      for (fsdp::ShardingStrategy const& strategy :
           {fsdp::ShardingStrategy(fsdp::FullShard{}), fsdp::ShardingStrategy(fsdp::ShardGradOp{})}) {
        CAPTURE(shape, tuning.lora_rank, tuning.lora_targets.size(), tuning.frozen_layers, strategy.name);
        auto const sizes = sizes_of({.shape = shape, .strategy = strategy, .ranks = 2, .tuning = tuning});
        CHECK(sizes.planned == sizes.reserved);
        CHECK(sizes.planned_peak == sizes.peak);
        CHECK(sizes.reduced == sizes.trained);
        CHECK(sizes.gathered == sizes.parameters);
        if (tuning.frozen_layers > 1) CHECK(sizes.activations < whole.activations);  // they share buffers
        bool const all = !tuning.adapts() && tuning.frozen_layers == 0;
        CHECK((sizes.trained == whole.trained) == all);
      }
    }
  }
}

TEST_CASE("an embedding and a head of their own are units, tied ones share the root", "[llama][memory]") {
  using Names = std::vector<std::string>;
  CHECK(sizes_of({.shape = "grouped"}).units == Names{"root", "model.layers.0", "model.layers.1"});
  CHECK(sizes_of({.shape = "llama3"}).units == Names{"embedding", "model.layers.0", "model.layers.1", "head"});
  CHECK(sizes_of({.shape = "llama3", .unit_layers = 0}).units == Names{"root"});
}

TEST_CASE("a Llama begins with HuggingFace's values", "[llama][init]") {
  llama_golden::Tensors tensors;
  fsdp::local::run(1, fsdp::host::Device{}, [&](auto comm) {
    using Engine = llama_golden::Model<fsdp::Fp32>::Engine;
    fsdp::Mesh mesh(std::move(comm));
    Engine engine(mesh, fsdp::FullShard{});
    llama::DecoderOptions options;
    options.tuning = adapters();
    llama::Llama<Engine> const model(engine, llama_golden::config_of("llama3"), 1, 1, options);
    fsdp::export_full(engine, llama_golden::keep(tensors));
  });
  CHECK(tensors.size() == 3 + 2 * (9 + 14));
  for (auto const& [name, values] : tensors) {
    CAPTURE(name);
    float const constant = name.find("norm") != name.npos ? 1.0f : 0.0f;
    if (constant > 0 || name.ends_with(transformer::lora_b)) {
      CHECK(std::all_of(values.begin(), values.end(), [&](float value) { return value == constant; }));
      continue;
    }
    double squares = 0;
    for (auto const value : values) squares += static_cast<double>(value) * static_cast<double>(value);
    auto const count = static_cast<double>(values.size());
    auto const in = name.find("down_proj") != name.npos ? 130.0 : 48.0;
    // Uniform values within a have the deviation a / sqrt(3).
    double const deviation = name.ends_with(transformer::lora_a) ? 1 / std::sqrt(3 * in) : 0.02;
    CHECK(std::abs(std::sqrt(squares / count) / deviation - 1) < 5 / std::sqrt(2 * count));
  }
}

TEST_CASE("what cannot be tuned is refused", "[llama][tuning]") {
  using Engine = model_test::DirectEngine<float>;
  auto const build = [](transformer::Tuning const& tuning) {
    Engine engine;
    llama::DecoderOptions options;
    options.tuning = tuning;
    llama::Llama<Engine> const model(engine, llama_golden::config_of("llama3"), 1, 8, options);
  };
  CHECK_NOTHROW(build(adapters({"self_attn.q_proj", "up_proj"})));
  CHECK_THROWS_AS(build(adapters({"proj"})), fsdp::ConfigError);    // no whole part of a name
  CHECK_THROWS_AS(build(adapters({"c_attn"})), fsdp::ConfigError);  // a GPT's
  CHECK_THROWS_AS(build(adapters({""})), fsdp::ConfigError);
  CHECK_THROWS_AS(build(frozen(3)), fsdp::ConfigError);
  CHECK_THROWS_AS(build(frozen(-1)), fsdp::ConfigError);
  auto both = adapters();
  both.frozen_layers = 1;
  CHECK_THROWS_AS(build(both), fsdp::ConfigError);
}
