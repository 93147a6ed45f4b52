// SPDX-License-Identifier: Apache-2.0
// Backward passes through activations alone: gradients of other passes stay as they are, nothing is reduced, and the
// input's gradient is that of a pass that writes gradients.
// full-run: [activations]
// timeout: 1800
// skip-sanitizers
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "fsdp/detail/step/check_program.hpp"
#include "fsdp/full_state.hpp"
#include "tests/catch.hpp"
#include "tests/support/counting.hpp"
#include "tests/support/local_run.hpp"
#include "tests/support/messages.hpp"
#include "tests/support/shard_group.hpp"

namespace {

using Device = fsdp::host::Device;
using Comm = fsdp::local::Communicator<Device>;
using fsdp::testing::has;
using fsdp::testing::what;

/// y = w x; backward returns whether it was asked for a gradient. @tparam skips  it can do without
template <bool skips>
struct Scale {
  static constexpr bool skips_gradients = skips;
  static constexpr std::int64_t width = 100;
  std::int64_t rows = 3;
  template <class T>
  struct Params {
    fsdp::Tensor<T, 1> w;
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor("w", p.w, {width}, fsdp::TensorOptions{.init = fsdp::init::normal(1.0f, 0.5f)});
  }
  void forward(fsdp::host::Stream& stream, Params<float const> const& w, float const* x, float* y) const {
    stream.enqueue([*this, w, x, y] {
      for (std::int64_t i = 0; i < rows * width; ++i) y[i] = w.w.data[i % width] * x[i];
    });
  }
  /// dy becomes the input's gradient.
  bool backward(fsdp::host::Stream& stream, Params<float const> const& w, Params<float> const& g, float const* x,
                float* dy) const {
    stream.enqueue([*this, w, g, x, dy] {
      for (std::int64_t i = 0; i < rows * width; ++i) {
        if (g.w.wanted()) g.w.data[i % width] += dy[i] * x[i];
        dy[i] *= w.w.data[i % width];
      }
    });
    return g.w.wanted();
  }
};

struct Run {
  int ranks = 1;
  fsdp::ShardingStrategy strategy = fsdp::FullShard{};
  fsdp::EngineOptions options{};
  std::vector<bool> frozen = std::vector<bool>(4);  ///< by layer
  bool waits = false;                               ///< gradients of the first micro-step wait
  bool keeps = false;                               ///< the pass through activations leaves parameters unsharded
  bool activations = true;                          ///< there are such passes
};
struct Result {
  std::vector<float> parameters;
  std::vector<std::vector<float>> inputs;  ///< gradients of the input, of each pass on rank 0
};

template <bool skips>
Result train(Run of) {
  Result result;
  of.options.allow_frozen_parameters = of.activations;
  fsdp::local::run(of.ranks, Device{}, [&](Comm comm) {
    bool const first = comm.rank() == 0;
    fsdp::Mesh mesh(std::move(comm));
    fsdp::Engine engine(mesh, of.strategy, of.options);
    std::vector<fsdp::ShardedModule<Scale<skips>, decltype(engine)>> layers;
    for (std::size_t i = 0; i < of.frozen.size(); ++i)
      layers.push_back(
          engine.shard(Scale<skips>{}, "h." + std::to_string(i), fsdp::UnitOptions{.frozen = of.frozen[i]}));
    fsdp::Sgd sgd(engine, {.momentum = 0.9f});
    constexpr std::size_t elements = 3 * Scale<skips>::width;
    std::vector<std::vector<float>> x(layers.size() + 1, std::vector<float>(elements));
    std::vector<float> dy(elements);
    /// @return number of layers that were asked for gradients
    auto const pass = [&](std::size_t salt) {
      engine.synchronize();
      for (std::size_t i = 0; i < elements; ++i) {
        x[0][i] = static_cast<float>((i * 7 + salt * 31 + static_cast<std::size_t>(engine.rank())) % 13) / 8;
        dy[i] = static_cast<float>((i * 5 + salt) % 11) / 16;
      }
      std::size_t wanted = 0;
      for (std::size_t i = 0; i < layers.size(); ++i) layers[i].forward(x[i].data(), x[i + 1].data());
      for (std::size_t i = layers.size(); i-- > 0;) wanted += layers[i].backward(x[i].data(), dy.data()) ? 1u : 0u;
      engine.synchronize();
      return wanted;
    };
    auto const through_activations = [&](std::size_t salt) {
      if (!of.activations) return;
      auto const keeps = engine.keep_unsharded(of.keeps);
      auto const frozen = engine.frozen_parameters();
      if (pass(salt) != (skips ? 0 : layers.size())) throw std::logic_error("gradients were asked for");
      if (first) result.inputs.push_back(dy);
    };
    for (std::size_t step = 0; step < 3; ++step) {
      through_activations(100 + step);
      {
        auto const waits = engine.no_sync(of.waits);
        pass(step * 2);
      }
      through_activations(100 + step);
      if (step == 1) through_activations(100 + step);
      pass(step * 2 + 1);
      through_activations(100 + step);
      sgd.step(0.01f);
    }
    if (auto const problem = check_program(engine.program(), engine.plan_input()); !problem.empty())
      throw std::logic_error(problem + "\n" + to_text(engine.program()));
    if (engine.shards().late_events() != 0) throw std::logic_error("an event is late");
    auto input = engine.plan_input();
    input.moments = 1;
    auto const plan = memory_plan(engine.program(), input);
    if (plan.reserved() != engine.account().reserved_state()) throw std::logic_error("the account is not as planned");
    if (engine.account().peak_live_state() > plan.live_most) throw std::logic_error("more is live than planned");
    bool const scratch = !skips && (of.activations || of.frozen[3]);
    if (engine.program().scratch_bytes != (scratch ? 4 * engine.shards()[0].full_numel() : 0))
      throw std::logic_error("the buffer of gradients that are not wanted is not as planned");
    export_full(engine, [&](fsdp::TensorInfo const&, std::span<float const> values) {
      result.parameters.insert(result.parameters.end(), values.begin(), values.end());
    });
  });
  return result;
}

template <bool skips>
void compare(Run of) {
  INFO("ranks " << of.ranks << ", " << of.strategy.name << ", prefetch " << of.options.prefetch << ", waits "
                << of.waits << ", keeps " << of.keeps << ", frozen " << of.frozen[0] << of.frozen[3]);
  auto const with = train<skips>(of);
  // Between two updates, such passes give the same gradients, whatever runs between them.
  REQUIRE(with.inputs.size() == 10);
  CHECK(with.inputs[0] == with.inputs[1]);
  CHECK(with.inputs[1] == with.inputs[2]);
  CHECK(with.inputs[3] == with.inputs[4]);
  CHECK(with.inputs[4] == with.inputs[5]);
  CHECK(with.inputs[5] == with.inputs[6]);
  CHECK(with.inputs[2] != with.inputs[3]);
  CHECK(with.inputs[6] != with.inputs[7]);
  of.activations = of.keeps = false;
  CHECK(train<skips>(of).parameters == with.parameters);
}

std::vector<Run> runs(int ranks) {
  std::vector<Run> all;
  std::vector<fsdp::ShardingStrategy> strategies{fsdp::FullShard{}, fsdp::ShardGradOp{}, fsdp::NoShard{}};
  if (ranks == 4) strategies.push_back(fsdp::HybridShard<fsdp::FullShard>{2});
  for (auto const& strategy : strategies)
    for (int const prefetch : {0, 1, 2}) {
      Run of{.ranks = ranks, .strategy = strategy};
      of.options.prefetch = prefetch;
      all.push_back(of);
      of.waits = of.options.allow_no_sync = true;
      all.push_back(of);
      of.keeps = of.options.allow_keep_unsharded = true;
      all.push_back(of);
      of.frozen = {true, true, false, true};
      all.push_back(of);
      of.options.trap_stale_pointers = true;
      all.push_back(of);
    }
  return all;
}

}  // namespace

TEST_CASE("passes through activations leave gradients as they are, and give the input's gradient") {
  int const ranks = GENERATE(1, 2);
  std::size_t count = 0;
  for (auto const& of : runs(ranks)) count++ % 2 == 0 ? compare<true>(of) : compare<false>(of);
}

TEST_CASE("the same for all settings", "[.][activations]") {
  int const ranks = GENERATE(1, 2, 3, 4);
  for (auto const& of : runs(ranks)) {
    compare<true>(of);
    compare<false>(of);
  }
}
