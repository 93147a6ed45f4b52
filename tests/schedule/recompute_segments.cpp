// SPDX-License-Identifier: Apache-2.0
// Recomputed activations, in segments of modules and in one module: the bits of a run that keeps everything, as many
// gathers, activations as planned to the byte; calls out of turn and wrong segments are refused by name.
// full-run: [segments]
// timeout: 1800
// skip-tsan
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/adopted_unit.hpp"
#include "fsdp/detail/step/check_program.hpp"
#include "fsdp/fsdp.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"
#include "fsdp/recompute.hpp"
#include "tests/catch.hpp"
#include "tests/support/counting.hpp"
#include "tests/support/messages.hpp"
#include "tests/support/rank_checks.hpp"
#include "tests/support/sanitized.hpp"
#include "tests/support/strategies.hpp"
#include "tests/support/toy_model.hpp"

namespace {

using Device = fsdp::host::Device;
using Local = fsdp::local::Communicator<Device>;
using Comm = toy::Counting<Local>;
using fsdp::testing::has;

/// The text of the UsageError, or of the error of another type, that `call` throws.
template <class Failure = fsdp::UsageError, class Call>
std::string what(Call const& call) {
  return fsdp::testing::what<Failure>(call);
}

constexpr std::int64_t width = 9, global_rows = 12;
constexpr std::size_t depth = 6;

/// 0 or 2 with equal probability: dropout of a half, by counter.
float mask(std::uint64_t counter, std::int64_t element) {
  auto x = (counter * 1000003u + static_cast<std::uint64_t>(element)) * 0x9e3779b97f4a7c15u;
  x ^= x >> 31, x *= 0xbf58476d1ce4e5b9u, x ^= x >> 29;
  return (x >> 40 & 1u) != 0 ? 2.0f : 0.0f;
}

/// Tensors of several kinds.
struct Kinds {
  bool frozen = false, replicated = false, fp32 = false;
};
/// y = x + gain * dropout(tanh(W x + b)), row by row.
struct Layer {
  static constexpr bool skips_gradients = true;
  std::int64_t rows, first_row;
  std::size_t number;
  Kinds kinds{};
  template <class T>
  struct Params {
    fsdp::Tensor<T, 2> weight;
    fsdp::Tensor<T, 1> bias;
    fsdp::Tensor<fsdp::in_fp32<T>, 1> gain;
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor("weight", p.weight, {width, width},
           fsdp::TensorOptions{.init = fsdp::init::normal(0.4f), .frozen = kinds.frozen});
    if (kinds.replicated)
      tensor("bias", p.bias, {width}, fsdp::TensorOptions{.strategy = fsdp::NoShard{}});
    else
      tensor("bias", p.bias, {width});
    if (kinds.fp32) tensor("gain", p.gain, {width}, fsdp::TensorOptions{.init = fsdp::init::ones});
  }
  /// @param micro_step  masks depend on it
  template <class W>
  void forward(fsdp::host::Stream& stream, Params<W> const& w, float const* x, float* y, float* saved,
               std::uint64_t micro_step) const {
    stream.enqueue([=, *this] {
      for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t j = 0; j < width; ++j) {
          float sum = fsdp::widen(w.bias.data[j]);
          for (std::int64_t k = 0; k < width; ++k) sum += x[r * width + k] * fsdp::widen(w.weight.data[j * width + k]);
          saved[r * width + j] = std::tanh(sum);
          y[r * width + j] = x[r * width + j] + gain(w, j) * drop(micro_step, r, j) * saved[r * width + j];
        }
      }
    });
  }
  /// @param dy  becomes the gradient of x
  template <class W, class G>
  void backward(fsdp::host::Stream& stream, Params<W> const& w, Params<G> const& g, float const* x, float const* saved,
                float* dy, std::uint64_t micro_step) const {
    stream.enqueue([=, *this] {
      std::vector<float> d(static_cast<std::size_t>(width));
      auto const add = [](auto const& tensor, std::int64_t at, float value) {
        using T = std::remove_reference_t<decltype(*tensor.data)>;
        if (tensor.wanted()) tensor.data[at] = fsdp::narrow<T>(fsdp::widen(tensor.data[at]) + value);
      };
      for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t j = 0; j < width; ++j) {
          float const act = saved[r * width + j], dact = dy[r * width + j] * drop(micro_step, r, j);
          if (kinds.fp32) add(g.gain, j, dact * act);
          d[static_cast<std::size_t>(j)] = dact * gain(w, j) * (1 - act * act);
          add(g.bias, j, d[static_cast<std::size_t>(j)]);
          for (std::int64_t k = 0; k < width; ++k)
            add(g.weight, j * width + k, d[static_cast<std::size_t>(j)] * x[r * width + k]);
        }
        for (std::int64_t j = 0; j < width; ++j)
          for (std::int64_t k = 0; k < width; ++k)
            dy[r * width + k] += d[static_cast<std::size_t>(j)] * fsdp::widen(w.weight.data[j * width + k]);
      }
    });
  }

 private:
  template <class W>
  float gain(Params<W> const& w, std::int64_t j) const {
    return kinds.fp32 ? w.gain.data[j] : 0.5f;
  }
  float drop(std::uint64_t micro_step, std::int64_t row, std::int64_t j) const {
    return mask(micro_step * depth + number, (first_row + row) * width + j);
  }
};

struct Case {
  int ranks = 2;
  fsdp::ShardingStrategy strategy = fsdp::FullShard{};
  fsdp::EngineOptions options{};
  Kinds kinds{};
  std::size_t frozen = 0;  ///< so many first layers do not train
  int micro_steps = 1;
  bool waits = false;        ///< all but the last micro-step of a step do not reduce
  bool activations = false;  ///< passes through the activations alone, between
  int steps = 2;
};
struct Result {
  std::vector<float> parameters;
  std::vector<double> losses;
  std::vector<fsdp::Counts> counts;  ///< of the last forward and backward pass of each step
};

template <class T>
void require(T const& holds, std::string const& what) {
  if (!holds) throw std::logic_error(what);
}

/// @param per_segment  layers of a segment; 0: no layer is recomputed
/// @return of rank 0
template <class P = fsdp::Fp32>
Result train(Case const& of, std::size_t per_segment) {
  Result result;
  fsdp::local::run(of.ranks, Device{}, [&](Local local) {
    auto tally = std::make_shared<toy::Tally>();
    fsdp::Mesh<Comm> mesh(Comm(std::move(local), tally));
    fsdp::Engine<Comm, P> engine(mesh, of.strategy, of.options);
    std::int64_t const rows = global_rows / of.ranks, first_row = rows * engine.rank();
    auto const bytes = static_cast<std::size_t>(rows * width) * sizeof(float);
    std::vector<fsdp::ShardedModule<Layer, fsdp::Engine<Comm, P>>> layers;
    for (std::size_t i = 0; i < depth; ++i)
      layers.push_back(engine.shard(Layer{rows, first_row, i, of.kinds}, "h." + std::to_string(i),
                                    fsdp::UnitOptions{.frozen = i < of.frozen}));
    fsdp::SegmentSizes const sizes{depth, per_segment == 0 ? depth : per_segment, bytes, bytes};
    Device device;
    auto const before = engine.account().reserved(fsdp::MemoryTag::activations);
    fsdp::SegmentActivations<Device> const kept(device, engine.account(), sizes);
    require(
        engine.account().reserved(fsdp::MemoryTag::activations) - before == static_cast<std::int64_t>(sizes.bytes()),
        "activations are not as planned");
    if (per_segment > 0)
      for (std::size_t i = 0; i < depth; i += per_segment) engine.recompute_segment(layers[i], layers[sizes.last(i)]);
    fsdp::AdamW adamw(engine, {.lr = 0.02f});
    auto const problem = check_program(engine.program(), engine.plan_input());
    require(problem.empty(), problem + "\n" + to_text(engine.program()));

    std::vector<float> dy(static_cast<std::size_t>(rows * width));
    auto& stream = engine.compute();
    double loss = 0;
    auto const x = [&](std::size_t i) { return kept.template input<float>(i); };
    auto const saved = [&](std::size_t i) { return kept.template kept<float>(i); };
    auto const micro_step = [&](std::uint64_t number) {
      stream.enqueue([=, p = x(0)] {
        for (std::int64_t i = 0; i < rows * width; ++i)
          p[i] = std::sin(static_cast<float>(first_row * width + i) + static_cast<float>(number) * 100);
      });
      for (std::size_t i = 0; i < depth; ++i) layers[i].forward(x(i), x(i + 1), saved(i), number);
      stream.enqueue([&loss, &dy, y = x(depth)] {
        for (std::size_t i = 0; i < dy.size(); ++i) {
          dy[i] = (y[i] - 0.3f) / static_cast<float>(dy.size());
          loss += static_cast<double>(dy[i]) * static_cast<double>(dy[i]);
        }
      });
      for (std::size_t i = depth; i-- > 0;) {
        if (per_segment > 0 && i == sizes.last(i))
          for (auto again = sizes.first(i); again <= i; ++again)
            layers[again].recompute(x(again), x(again + 1), saved(again), number);
        layers[i].backward(x(i), saved(i), dy.data(), number);
      }
    };
    std::vector<double> losses;
    std::vector<fsdp::Counts> counts;
    for (int step = 0; step < of.steps; ++step) {
      for (int micro = 0; micro < of.micro_steps; ++micro) {
        auto const number = static_cast<std::uint64_t>(step * of.micro_steps + micro);
        if (of.activations) {
          auto const scope = engine.frozen_parameters();
          micro_step(1000 + number);
        }
        auto const waits = engine.no_sync(of.waits && micro + 1 < of.micro_steps);
        tally->entries.clear();
        micro_step(number);
      }
      // Without segments, a pass may gather fewer: below the lowest layer that trains, nothing.
      counts.push_back(toy::counts_of(*tally, 0, "forward"));
      counts.push_back(toy::counts_of(*tally, 0, "backward"));
      require(counts.back() ==
                  count(engine.program(), fsdp::PassKind::backward,
                        of.waits ? fsdp::starts_sharded | fsdp::reshards | fsdp::syncs_all | fsdp::gradients_wait
                                 : fsdp::plain_step),
              "the engine counts otherwise than its program");
      require(engine.account().live(fsdp::MemoryTag::gather) == 0, "a backward pass leaves parameters");
      adamw.step(fsdp::clip_grad_norm(engine, 1.0f));
      engine.synchronize();
      losses.push_back(loss);
    }
    require(engine.shards().late_events() == 0, "an event is late");
    auto const plan = memory_plan(engine.program(), engine.plan_input());
    require(plan.reserved() == engine.account().reserved_state(), "the account is not as planned");
    require(engine.account().peak_live_state() <= plan.live_most, "more bytes are in use than planned");
    auto parameters = toy::parameters(engine);
    if (engine.rank() == 0) result = {std::move(parameters), std::move(losses), std::move(counts)};
  });
  return result;
}

using fsdp::testing::strategies;
using fsdp::testing::strategies_in_turn;
constexpr std::size_t lengths[]{1, 2, 3, 4, depth};

template <class P = fsdp::Fp32>
void compare(Case const& of) {
  std::optional<Result> plain;
  for (auto const per_segment : lengths) {
    if (!fsdp::testing::next_cell(7)) continue;
    if (!plain) plain = train<P>(of, 0);
    INFO("ranks " << of.ranks << ", " << of.strategy.name << ", prefetch " << of.options.prefetch << ", " << per_segment
                  << " a segment, " << of.frozen << " frozen");
    auto const recomputed = train<P>(of, per_segment);
    CHECK(recomputed.parameters == plain->parameters);
    CHECK(recomputed.losses == plain->losses);
    if (of.frozen % per_segment == 0) CHECK((recomputed.counts == plain->counts));
  }
}

}  // namespace

TEST_CASE("segments of any length change no bit, and gather as often as without") {
  int const ranks = GENERATE(1, 2, 3, 4);
  int const prefetch = GENERATE(0, 1, 2, 3);
  for (auto const& strategy : strategies_in_turn(ranks, ranks, prefetch)) {
    Case of{ranks, strategy};
    of.options.prefetch = prefetch;
    compare(of);
  }
}

TEST_CASE("segments change no bit when gradients accumulate, and parameters are kept or not") {
  int const ranks = GENERATE(1, 2, 4);
  for (auto const& strategy : strategies(ranks)) {
    Case of{ranks, strategy};
    of.micro_steps = 3;
    compare(of);
    of.waits = of.options.allow_no_sync = true;
    compare(of);
    of.options.keep_last = false;
    compare(of);
  }
  if (ranks != 4) return;
  Case of{ranks, fsdp::FullShard{}, {.keep_last = false, .reshard_ranks = 2}};
  compare(of);
  of.options = {.prefetch = 3, .max_ahead_bytes = 900};
  compare(of);
}

TEST_CASE("modules of several kinds of tensors are recomputed with all their units") {
  int const ranks = GENERATE(1, 2, 3);
  for (auto const& strategy : strategies(ranks)) {
    for (Kinds const kinds : {Kinds{true, false, false}, Kinds{false, true, true}, Kinds{true, true, true}}) {
      Case of{ranks, strategy, {}, kinds};
      compare(of);
      compare<fsdp::Bf16>(of);
    }
  }
}

TEST_CASE("with frozen units, segments are recomputed as far as backward needs them") {
  int const ranks = GENERATE(1, 2, 3);
  int const prefetch = GENERATE(0, 1, 2, 3);
  for (int const frozen : {1, 2, 3, 5}) {
    for (auto const& strategy : strategies_in_turn(ranks, ranks + prefetch, frozen)) {
      Case of{ranks, strategy};
      of.options.prefetch = prefetch;
      of.frozen = static_cast<std::size_t>(frozen);
      compare(of);
    }
  }
}

TEST_CASE("passes through activations alone recompute all segments") {
  int const ranks = GENERATE(1, 2);
  for (std::size_t const frozen : {0u, 3u}) {
    for (auto const& strategy : strategies(ranks)) {
      Case of{ranks, strategy, {.allow_frozen_parameters = true}};
      of.frozen = frozen;
      of.activations = true;
      compare(of);
    }
  }
}

TEST_CASE("segments of any length and of frozen units change no bit with any depth of prefetch", "[.][segments]") {
  int const ranks = GENERATE(1, 2, 3, 4);
  int const prefetch = GENERATE(0, 1, 2, 3);
  for (auto const& strategy : strategies(ranks)) {
    for (std::size_t const frozen : {0u, 1u, 2u, 3u, 4u, 5u}) {
      for (Kinds const kinds : {Kinds{}, Kinds{true, true, true}}) {
        Case plain{ranks, strategy, {.prefetch = prefetch}, kinds};
        plain.frozen = frozen;
        compare(plain);
        for (bool const waits : {false, true}) {
          Case of{ranks, strategy, {.prefetch = prefetch, .allow_no_sync = waits, .allow_frozen_parameters = true}};
          of.kinds = kinds, of.frozen = frozen;
          of.micro_steps = 2, of.waits = of.activations = waits;
          compare(of);
          compare<fsdp::Bf16>(of);
        }
      }
    }
  }
}

TEST_CASE("activations take the bytes that are planned: inputs of segments, and one segment") {
  fsdp::SegmentSizes sizes{12, 3, 1000, 700};
  CHECK(sizes.segments() == 4);
  CHECK(sizes.bytes() == (4 + 3) * 1024 + 3 * 768);
  CHECK(sizes.first(5) == 3);
  CHECK(sizes.last(5) == 5);
  sizes.layers = 13;
  CHECK(sizes.segments() == 5);
  CHECK(sizes.last(12) == 12);
  CHECK(sizes.bytes() == (5 + 3) * 1024 + 3 * 768);
  sizes.per_segment = 100;
  CHECK(sizes.bytes() == (1 + 13) * 1024 + 13 * 768);
  // No two buffers that are needed at a time overlap.
  for (std::size_t const layers : {1u, 2u, 5u, 6u}) {
    for (std::size_t const per_segment : {1u, 2u, 3u, 6u}) {
      Device device;
      fsdp::MemoryAccount account;
      fsdp::SegmentActivations<Device> const kept(device, account, {layers, per_segment, 256, 512});
      for (std::size_t i = 0; i < layers; ++i) {  // the segment of i runs
        std::vector<std::pair<std::byte*, std::byte*>> parts;
        auto const add = [&](std::byte* begin, std::ptrdiff_t bytes) { parts.emplace_back(begin, begin + bytes); };
        for (std::size_t j = 0; j <= layers; ++j)
          if (j == layers || j == kept.sizes().first(j)) add(kept.input<std::byte>(j), 256);
        for (auto j = kept.sizes().first(i); j <= kept.sizes().last(i); ++j) {
          if (j != kept.sizes().first(i)) add(kept.input<std::byte>(j), 256);
          add(kept.kept<std::byte>(j), 512);
        }
        std::sort(parts.begin(), parts.end());
        for (std::size_t part = 1; part < parts.size(); ++part) CHECK(parts[part - 1].second <= parts[part].first);
        CHECK(parts.back().second <= kept.input<std::byte>(0) + kept.bytes());
      }
    }
  }
}

TEST_CASE("activations of layers that do not exist are refused") {
  Device device;
  fsdp::MemoryAccount account;
  fsdp::SegmentActivations<Device> const kept(device, account, {4, 2, 256, 512});
  static_cast<void>(kept.input<float>(4));
  CHECK(has(what([&] { static_cast<void>(kept.input<float>(5)); }),
            "SegmentActivations::input: there is no layer 5; there are 4, counted from 0"));
  CHECK(has(what([&] { static_cast<void>(kept.output<float>(4)); }), "::output: there is no layer 4"));
  CHECK(has(what([&] { static_cast<void>(kept.kept<float>(4)); }), "::kept: there is no layer 4"));
  for (auto const& sizes : {fsdp::SegmentSizes{0, 1, 256, 512}, fsdp::SegmentSizes{4, 0, 256, 512}})
    CHECK(has(what([&] { fsdp::SegmentActivations<Device> const none(device, account, sizes); }), "at least 1"));
}

TEST_CASE("one module recomputes in its own backward, without a segment") {
  auto const train_one = [](bool recompute, int ranks) {
    std::vector<float> result;
    fsdp::local::run(ranks, Device{}, [&](Local comm) {
      fsdp::Mesh mesh(std::move(comm));
      fsdp::Engine engine(mesh, fsdp::FullShard{});
      std::int64_t const rows = global_rows / ranks, first_row = rows * engine.rank();
      auto const elements = static_cast<std::size_t>(rows * width);
      std::vector<Layer> plain;
      std::vector<fsdp::Recompute<Layer>> wrapped;
      for (std::size_t i = 0; i < depth; ++i) plain.push_back({rows, first_row, i});
      for (auto const& layer : plain) wrapped.push_back({layer});
      using E = decltype(engine);
      std::vector<fsdp::ShardedModule<Layer, E>> layers;
      std::vector<fsdp::ShardedModule<fsdp::Recompute<Layer>, E>> again;
      if (recompute)
        again = engine.shard(wrapped, "h");
      else
        layers = engine.shard(plain, "h");
      fsdp::AdamW adamw(engine, {.lr = 0.02f});
      std::vector<std::vector<float>> x(depth + 1, std::vector<float>(elements, 0.1f)),
          saved(recompute ? 1 : depth, std::vector<float>(elements));
      std::vector<float> dy(elements), scratch(elements);
      for (std::uint64_t step = 0; step < 3; ++step) {
        for (std::size_t i = 0; i < depth; ++i) {
          if (recompute)
            again[i].forward(x[i].data(), x[i + 1].data(), saved[0].data(), step);
          else
            layers[i].forward(x[i].data(), x[i + 1].data(), saved[i].data(), step);
        }
        engine.compute().enqueue([&] {
          for (std::size_t i = 0; i < elements; ++i) dy[i] = x[depth][i];
        });
        for (std::size_t i = depth; i-- > 0;) {
          if (recompute)
            again[i].backward(fsdp::forward_with(x[i].data(), scratch.data(), saved[0].data(), step), x[i].data(),
                              saved[0].data(), dy.data(), step);
          else
            layers[i].backward(x[i].data(), saved[i].data(), dy.data(), step);
        }
        adamw.step();
      }
      engine.synchronize();
      auto parameters = toy::parameters(engine);
      if (engine.rank() == 0) result = std::move(parameters);
    });
    return result;
  };
  for (int const ranks : {1, 2, 3}) CHECK(train_one(true, ranks) == train_one(false, ranks));
  static_assert(fsdp::Module<fsdp::Recompute<Layer>> && fsdp::SkipsGradients<fsdp::Recompute<Layer>>);
  static_assert(fsdp::SetsGradients<fsdp::Recompute<toy::Layer<Device>>>);
}

namespace {

/// A module without computation, for tests of the order of calls.
struct Bare {
  template <class T>
  struct Params {
    fsdp::Tensor<T, 1> weight;
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor("weight", p.weight, {5});
  }
  template <class W>
  int forward(fsdp::host::Stream&, Params<W> const& w) const {
    return w.weight.data == nullptr ? 0 : 7;
  }
  template <class W, class G>
  void backward(fsdp::host::Stream&, Params<W> const&, Params<G> const&) const {}
};
template <class Act>
void with_engine(Act const& act, fsdp::EngineOptions options = {}) {
  fsdp::local::run(1, Device{}, [&](Local comm) {
    fsdp::Mesh mesh(std::move(comm));
    fsdp::Engine engine(mesh, fsdp::FullShard{}, options);
    auto layers = engine.shard(std::vector(4, Bare{}), "h");
    act(engine, layers);
  });
}
template <class Layers>
void micro_step(Layers& layers, std::size_t first, std::size_t last) {
  for (auto& layer : layers) layer.forward();
  for (auto i = layers.size(); i-- > 0;) {
    if (i == last)
      for (auto again = first; again <= last; ++again) CHECK(layers[again].recompute() == 7);
    layers[i].backward();
  }
}

}  // namespace

TEST_CASE("below the lowest module that trains, modules of a segment are skipped, and others may not be recomputed") {
  fsdp::local::run(1, Device{}, [](Local comm) {
    fsdp::Mesh mesh(std::move(comm));
    fsdp::Engine engine(mesh, fsdp::FullShard{});
    auto frozen = engine.shard(std::vector(3, Bare{}), "frozen", {.frozen = true});
    auto head = engine.shard(Bare{}, "head");
    engine.recompute_segment(frozen[1], frozen[2]);
    for (int pass = 0; pass < 2; ++pass) {
      for (auto& layer : frozen) layer.forward();
      head.forward();
      head.backward();
      for (auto& layer : frozen) layer.backward();
      CHECK((frozen[1].recompute() == 0 && frozen[2].recompute() == 0));
      CHECK(has(what<fsdp::OrderError>([&] { frozen[0].recompute(); }), "was called without a forward pass"));
    }
  });
}

TEST_CASE("calls out of turn name the module and what comes next, and change nothing") {
  with_engine([](auto& engine, auto& layers) {
    engine.recompute_segment(layers[1], layers[2]);
    fsdp::Sgd sgd(engine);
    auto const message = [](auto const& call) { return what<fsdp::OrderError>(call); };
    CHECK(has(message([&] { layers[1].recompute(); }), "recompute of 'h.1' was called without a forward pass"));
    for (auto& layer : layers) layer.forward();
    CHECK(has(message([&] { layers[1].recompute(); }), "expected backward of 'h.3', got recompute of 'h.1'"));
    layers[3].backward();
    CHECK(has(message([&] { layers[2].backward(); }), "expected recompute of 'h.1', got backward of 'h.2'"));
    CHECK(has(message([&] { layers[2].recompute(); }), "expected recompute of 'h.1', got recompute of 'h.2'"));
    CHECK(has(message([&] { layers[0].recompute(); }), "expected recompute of 'h.1', got recompute of 'h.0'"));
    layers[1].recompute();
    CHECK(has(message([&] { layers[1].backward(); }), "expected recompute of 'h.2', got backward of 'h.1'"));
    layers[2].recompute();
    CHECK(has(message([&] { layers[2].recompute(); }), "expected backward of 'h.2', got recompute of 'h.2'"));
    CHECK(has(what<fsdp::UsageError>([&] { sgd.step(); }), "a backward pass is incomplete"));
    layers[2].backward();
    CHECK(has(message([&] { layers[2].recompute(); }), "expected backward of 'h.1', got recompute of 'h.2'"));
    layers[1].backward();
    layers[0].backward();
    sgd.step();
    for (auto& layer : layers) layer.forward();
    layers[3].backward();
    layers[1].recompute();
    engine.discard_gradients();
    micro_step(layers, 1, 2);
    sgd.step();
    {
      auto const scope = engine.evaluation();
      for (auto& layer : layers) layer.forward();
      CHECK(has(what<fsdp::UsageError>([&] { layers[1].recompute(); }),
                "recompute of 'h.1' was called inside an evaluation"));
    }
    CHECK(has(what<fsdp::UsageError>([&] { engine.recompute_segment(layers[0], layers[0]); }),
              "a segment was named too late"));
    micro_step(layers, 1, 2);
    sgd.step();
  });
}

TEST_CASE("a segment's scope is named when it stays open") {
  with_engine([](auto& engine, auto& layers) {
    engine.recompute_segment(layers[2], layers[3]);
    for (auto& layer : layers) layer.forward();
    {
      auto const scope = engine.recompute_scope(layers[2]);
      CHECK(scope.gradients() == nullptr);
      CHECK(has(what<fsdp::UsageError>([&] { layers[3].recompute(); }),
                "recompute of 'h.3' begins, but recompute of 'h.2' has not ended"));
    }
    layers[3].recompute();
    for (auto i = layers.size(); i-- > 0;) layers[i].backward();
  });
}

TEST_CASE("an exception in a recomputed module ends the pass, and gradients can be discarded") {
  with_engine([](auto& engine, auto& layers) {
    engine.recompute_segment(layers[1], layers[2]);
    fsdp::Sgd sgd(engine);
    for (auto& layer : layers) layer.forward();
    layers[3].backward();
    CHECK_THROWS_AS(
        [&] {
          auto const scope = engine.recompute_scope(layers[1]);
          throw std::runtime_error("out of memory");
        }(),
        std::runtime_error);
    CHECK(engine.account().live(fsdp::MemoryTag::gather) == 0);
    CHECK(has(what<fsdp::UsageError>([&] { layers[1].recompute(); }), "an exception has interrupted a backward pass"));
    engine.discard_gradients();
    micro_step(layers, 1, 2);
    sgd.step();
  });
}

TEST_CASE("wrong segments are refused by name, and change nothing") {
  with_engine([](auto& engine, auto& layers) {
    auto const message = [&](fsdp::UseId first, fsdp::UseId last) {
      return what<fsdp::UsageError>([&] { engine.recompute_segment(first, last); });
    };
    engine.recompute_segment(layers[1], layers[2]);
    CHECK(has(message(layers[0], layers[1]), "the segment 'h.0' to 'h.1' overlaps another one: 'h.1' is in both"));
    CHECK(has(message(layers[0], layers[3]), "the segment 'h.0' to 'h.3' overlaps another one: 'h.1' is in both"));
    CHECK(has(message(layers[3], layers[0]), "the segment 'h.3' to 'h.0' ends before it begins"));
    CHECK(has(message(layers[3], {4}), "there is no use 4"));
    std::string foreign;
    with_engine([&](auto&, auto& others) { foreign = message(others[0], layers[0]); });
    CHECK(has(foreign, "belongs to another engine"));
    auto const input = engine.plan_input();
    CHECK(input.segments == std::vector<std::size_t>{fsdp::UseOrder::none, 1, 1, fsdp::UseOrder::none});
    engine.recompute_segment(layers[3], layers[3]);
    for (auto& layer : layers) layer.forward();
    layers[3].recompute();
    layers[3].backward();
  });
}

TEST_CASE("a segment with a unit that is used outside, such as a tied head, is refused") {
  fsdp::local::run(1, Device{}, [&](Local comm) {
    fsdp::Mesh mesh(std::move(comm));
    fsdp::Engine engine(mesh, fsdp::FullShard{});
    auto const root = engine.add_unit("root");
    auto embed = engine.shard(Bare{}, "embed", root);
    auto layer = engine.shard(Bare{}, "h");
    auto const early = engine.add_unit("early");
    auto inside = engine.shard(Bare{}, "inside", early);
    engine.recompute_segment(layer, inside);
    CHECK(has(what<fsdp::UsageError>([&] { engine.shard(Bare{}, "outside", early); }),
              "module 'outside' uses a unit of a segment, but is outside it"));
    auto last = engine.shard(Bare{}, "last");
    auto head = engine.shard(Bare{}, "embed", root);
    auto const names = what<fsdp::UsageError>([&] { engine.recompute_segment(last, head); });
    CHECK(has(names,
              "the segment 'last' to 'embed' contains 'embed', but not 'embed', which uses the same unit "
              "'root'; leave both out"));
    embed.forward(), layer.forward(), inside.forward(), last.forward(), head.forward();
    head.backward(), last.backward();
    layer.recompute(), inside.recompute();
    inside.backward(), layer.backward(), embed.backward();
  });
}

TEST_CASE("ranks that differ in their segments are an error on all ranks") {
  std::vector<std::string> texts(2);
  fsdp::local::run(2, Device{}, [&](Local comm) {
    auto const rank = static_cast<std::size_t>(comm.rank());
    fsdp::Mesh mesh(std::move(comm));
    fsdp::Engine engine(mesh, fsdp::FullShard{});
    auto layers = engine.shard(std::vector(4, Bare{}), "h");
    if (rank == 1) engine.recompute_segment(layers[1], layers[2]);
    texts[rank] = what<fsdp::ConfigError>([&] { engine.seal(); });
  });
  for (auto const& text : texts)
    CHECK(has(
        text,
        "rank 0 has \"segments that are recomputed:\", rank 1 has \"segments that are recomputed: 'h.1' to 'h.2'\""));
}

TEST_CASE("adopted units are recomputed in segments") {
  fsdp::local::run(2, Device{}, [&](Local comm) {
    fsdp::Mesh mesh(std::move(comm));
    fsdp::host::Stream stream = fsdp::host::Stream::inline_stream("caller");
    fsdp::Engine engine(mesh, fsdp::FullShard{}, {}, stream);
    float *w[2]{}, *g[2]{};
    std::vector<fsdp::AdoptedUnit<decltype(engine)>> units;
    for (int i = 0; i < 2; ++i)
      units.emplace_back(engine, "fc." + std::to_string(i),
                         std::vector<fsdp::AdoptedTensor<float, float>>{{"w." + std::to_string(i), &w[i], &g[i], {3}}});
    engine.recompute_segment(units[0], units[1]);
    fsdp::Sgd sgd(engine);
    for (auto& unit : units) auto const full = unit.forward();
    for (int i = 0; i < 2; ++i) {
      auto const full = units[static_cast<std::size_t>(i)].recompute();
      RANK_CHECK(w[i] != nullptr);
      RANK_CHECK(g[i] == nullptr);
    }
    for (int i = 2; i-- > 0;) {
      auto const full = units[static_cast<std::size_t>(i)].backward();
      RANK_CHECK(g[i] != nullptr);
      g[i][0] += 1;
    }
    sgd.step();
  });
  CHECK_RANKS();
}

TEST_CASE("without prefetch a segment needs as many gather buffers as it has units; each unit is gathered once") {
  for (int const prefetch : {0, 1, 2}) {
    for (std::size_t const per_segment : lengths) {
      fsdp::local::run(2, Device{}, [&](Local comm) {
        fsdp::Mesh mesh(std::move(comm));
        fsdp::Engine engine(mesh, fsdp::FullShard{}, {.prefetch = prefetch, .keep_last = false});
        auto layers = engine.shard(std::vector(depth, Bare{}), "h");
        for (std::size_t i = 0; i < depth; i += per_segment)
          engine.recompute_segment(layers[i], layers[std::min(i + per_segment, depth) - 1]);
        engine.seal();
        if (engine.rank() != 0) return;
        auto const& program = engine.program();
        INFO("prefetch " << prefetch << ", " << per_segment << " a segment\n" << to_text(program, fsdp::plain_step));
        CHECK(program.gather_slots.size() == std::max(per_segment, static_cast<std::size_t>(prefetch) + 1));
        CHECK(count(program, fsdp::PassKind::backward, fsdp::plain_step).all_gather.calls == depth);
        CHECK(program.turns(fsdp::PassKind::backward).size() == 2 * depth);
      });
    }
  }
}

TEST_CASE("a segment in which backward ends is gathered once as a whole, and segments below it not at all") {
  // The layers 0 to 3 of 6 are frozen.
  for (auto const& expected : {std::pair(1u, 2u), {2u, 2u}, {3u, 3u}, {4u, 2u}, {5u, 6u}, {6u, 6u}}) {
    auto const per_segment = expected.first, gathered = expected.second;
    for (bool const reshards : {true, false}) {
      fsdp::local::run(2, Device{}, [&](Local comm) {
        fsdp::Mesh mesh(std::move(comm));
        auto const strategy = reshards ? fsdp::ShardingStrategy(fsdp::FullShard{}) : fsdp::ShardGradOp{};
        fsdp::Engine engine(mesh, strategy, {.prefetch = 2, .keep_last = false});
        auto layers = engine.shard(std::vector(4, Bare{}), "frozen", {.frozen = true});
        for (auto& layer : engine.shard(std::vector(depth - 4, Bare{}), "h")) layers.push_back(std::move(layer));
        for (std::size_t i = 0; i < depth; i += per_segment)
          engine.recompute_segment(layers[i], layers[std::min<std::size_t>(i + per_segment, depth) - 1]);
        engine.seal();
        if (engine.rank() != 0) return;
        INFO(per_segment << " a segment\n" << to_text(engine.program(), fsdp::plain_step));
        // ShardGradOp keeps them after forward.
        CHECK(count(engine.program(), fsdp::PassKind::backward, fsdp::plain_step).all_gather.calls ==
              (reshards ? gathered : 0));
        CHECK(engine.program().turns(fsdp::PassKind::backward).size() == 2 + gathered);
      });
    }
  }
}
