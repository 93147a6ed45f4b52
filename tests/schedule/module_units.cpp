// SPDX-License-Identifier: Apache-2.0
// Modules whose tensors lie in several units, because some are frozen, some fp32, some not sharded: the bits of one
// unit, memory as planned, and what is refused.
// full-run: [units]
// timeout: 1800
// skip-tsan
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/checkpoint.hpp"
#include "fsdp/detail/step/check_program.hpp"
#include "fsdp/fsdp.hpp"
#include "fsdp/full_state.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"
#include "tests/catch.hpp"
#include "tests/support/messages.hpp"
#include "tests/support/sanitized.hpp"
#include "tests/support/strategies.hpp"
#include "tests/support/temporary_folder.hpp"

namespace {

using Device = fsdp::host::Device;
using Stream = fsdp::host::Stream;
using Comm = fsdp::local::Communicator<Device>;
using fsdp::testing::has;
using fsdp::testing::what;
using Index = std::int64_t;

constexpr Index width = 40, rank_of_adapters = 3, depth = 5, global_rows = 12;

/// How the tensors of a block are declared.
struct Kinds {
  bool frozen = false;  ///< weight and table do not train
  bool skips = false;   ///< and their gradients are not written
  bool apart = false;   ///< the adapters are not sharded
};

template <class T>
float at(T const* data, Index i) {
  return static_cast<float>(data[i]);
}
template <class T>
void add_to(T* data, Index i, float value) {
  data[i] = fsdp::narrow<T>(static_cast<float>(data[i]) + value);
}

/// y = x + gain * h / (1 + |h|), with h = weight x + up (down x).
struct Block {
  Index rows;
  Kinds kinds{};
  bool skips_gradients = false;

  Block(Index count, Kinds how) : rows(count), kinds(how), skips_gradients(how.skips) {}

  template <class T>
  struct Params {
    fsdp::Tensor<fsdp::in_fp32<T>, 1> gain;
    fsdp::Tensor<T, 2> weight, down, up;
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    fsdp::TensorOptions adapters{.init = fsdp::init::normal(0.2f)};
    if (kinds.apart) adapters.strategy = fsdp::NoShard{};
    tensor("gain", p.gain, {width}, fsdp::TensorOptions{.decay = false, .init = fsdp::init::normal(1.0f, 0.1f)});
    tensor("weight", p.weight, {width, width},
           fsdp::TensorOptions{.init = fsdp::init::normal(0.1f), .frozen = kinds.frozen});
    tensor("down", p.down, {rank_of_adapters, width}, adapters);
    tensor("up", p.up, {width, rank_of_adapters}, adapters);
  }
  struct Saved {
    std::vector<float> hidden = std::vector<float>(global_rows * width), low = std::vector<float>(global_rows * 8);
  };
  template <class W>
  void forward(Stream& stream, Params<W> const& w, float const* x, float* y, Saved& saved) const {
    stream.enqueue([rows = rows, w, x, y, &saved] {
      for (Index r = 0; r < rows; ++r) {
        auto const* const in = x + r * width;
        auto* const low = saved.low.data() + r * rank_of_adapters;
        for (Index i = 0; i < rank_of_adapters; ++i) {
          low[i] = 0;
          for (Index k = 0; k < width; ++k) low[i] += at(w.down.data, i * width + k) * in[k];
        }
        for (Index j = 0; j < width; ++j) {
          float h = 0;
          for (Index k = 0; k < width; ++k) h += at(w.weight.data, j * width + k) * in[k];
          for (Index i = 0; i < rank_of_adapters; ++i) h += at(w.up.data, j * rank_of_adapters + i) * low[i];
          saved.hidden[static_cast<std::size_t>(r * width + j)] = h;
          y[r * width + j] = in[j] + w.gain.data[j] * h / (1 + std::abs(h));
        }
      }
    });
  }
  /// dy becomes the input's gradient.
  template <class W, class G>
  void backward(Stream& stream, Params<W> const& w, Params<G> const& g, float const* x, float* dy, Saved& saved) const {
    stream.enqueue([rows = rows, w, g, x, dy, &saved] {
      std::array<float, width> slope{};
      std::array<float, rank_of_adapters> low{};
      for (Index r = 0; r < rows; ++r) {
        auto const* const in = x + r * width;
        auto* const d = dy + r * width;
        for (Index j = 0; j < width; ++j) {
          float const h = saved.hidden[static_cast<std::size_t>(r * width + j)], size = 1 + std::abs(h);
          g.gain.data[j] += d[j] * h / size;
          slope[static_cast<std::size_t>(j)] = d[j] * w.gain.data[j] / (size * size);
        }
        low = {};
        for (Index j = 0; j < width; ++j) {
          float const s = slope[static_cast<std::size_t>(j)];
          for (Index k = 0; g.weight.wanted() && k < width; ++k) add_to(g.weight.data, j * width + k, s * in[k]);
          for (Index i = 0; i < rank_of_adapters; ++i) {
            add_to(g.up.data, j * rank_of_adapters + i,
                   s * saved.low[static_cast<std::size_t>(r * rank_of_adapters + i)]);
            low[static_cast<std::size_t>(i)] += s * at(w.up.data, j * rank_of_adapters + i);
          }
          for (Index k = 0; k < width; ++k) d[k] += s * at(w.weight.data, j * width + k);
        }
        for (Index i = 0; i < rank_of_adapters; ++i)
          for (Index k = 0; k < width; ++k) {
            add_to(g.down.data, i * width + k, low[static_cast<std::size_t>(i)] * in[k]);
            d[k] += low[static_cast<std::size_t>(i)] * at(w.down.data, i * width + k);
          }
      }
    });
  }
};

/// y = x + row `row` of a table that two modules share.
struct Shift {
  Index rows, row;
  Kinds kinds{};
  template <class T>
  struct Params {
    fsdp::Tensor<T, 2> table;
    fsdp::Tensor<T, 1> own;
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor("table", p.table, {2, width}, fsdp::TensorOptions{.init = fsdp::init::normal(0.5f), .frozen = kinds.frozen});
    tensor(row == 0 ? "first" : "second", p.own, {width}, fsdp::no_decay);
  }
  template <class W>
  void forward(Stream& stream, Params<W> const& w, float const* x, float* y) const {
    stream.enqueue([*this, w, x, y] {
      for (Index i = 0; i < rows * width; ++i)
        y[i] = x[i] + at(w.table.data, row * width + i % width) + at(w.own.data, i % width);
    });
  }
  template <class W, class G>
  void backward(Stream& stream, Params<W> const&, Params<G> const& g, float const* dy) const {
    stream.enqueue([*this, g, dy] {
      for (Index i = 0; i < rows * width; ++i) {
        add_to(g.table.data, row * width + i % width, dy[i]);
        add_to(g.own.data, i % width, dy[i]);
      }
    });
  }
};

struct Run {
  int ranks = 1;
  fsdp::ShardingStrategy strategy = fsdp::FullShard{};
  Kinds kinds{};
  fsdp::EngineOptions options{};
  int micro_steps = 1;
  bool waits = false;  ///< micro-steps but the last do not reduce
};

struct Result {
  std::map<std::string, std::vector<float>> parameters;
  fsdp::MemoryPlan plan;
  std::string text;
};

/// A program that is wrong, an account that is not as planned, and late events throw.
template <class E>
void expect_sound(E& engine, int moments = 0) {
  if (auto const problem = check_program(engine.program(), engine.plan_input()); !problem.empty())
    throw std::logic_error(problem + "\n" + to_text(engine.program()));
  if (engine.shards().late_events() != 0) throw std::logic_error("an event is late");
  auto input = engine.plan_input();
  input.moments = moments;
  auto const plan = memory_plan(engine.program(), input);
  if (plan.reserved() != engine.account().reserved_state()) throw std::logic_error("the account is not as planned");
  if (engine.account().peak_live_state() > plan.live_most) throw std::logic_error("more is live than planned");
}

bool is_base(std::string const& tensor) { return tensor.ends_with("weight") || tensor.ends_with("table"); }

/// master -= rate * gradient of all tensors but the weights and the table.
template <class E>
void descend(E& engine) {
  auto const shards = engine.shards();
  shards.begin_step("descend", 0.1f);
  for (std::size_t u = 0; u < shards.size(); ++u) {
    auto& unit = shards[u];
    if (!unit.trains()) continue;
    auto const update = shards.update(unit);
    for (auto const& part : unit.layout().segments(unit.shard())) {
      auto const& name = unit.layout().tensors()[part.tensor].name;
      if (is_base(name)) continue;
      unit.with_master([&](auto* master) {
        engine.compute().enqueue([=, gradient = unit.gradient] {
          for (Index i = part.offset; i < part.offset + part.count; ++i) add_to(master, i, -0.5f * gradient[i]);
        });
      });
    }
  }
}

/// A table at both ends, blocks between them. @param visit  visit(engine) at the end, on rank 0
template <class P, class Visit>
Result train(Run const& of, Visit const& visit) {
  Result result;
  fsdp::local::run(of.ranks, Device{}, [&](Comm comm) {
    bool const first = comm.rank() == 0;
    Index const rows = global_rows / comm.size(), from = rows * comm.rank();
    fsdp::Mesh mesh(std::move(comm));
    fsdp::Engine engine(mesh, of.strategy, P{}, of.options);
    auto const ends = engine.add_unit("ends");
    auto low = engine.shard(Shift{rows, 0, of.kinds}, "ends", ends);
    auto blocks = engine.shard(std::vector(depth, Block(rows, of.kinds)), "h");
    auto high = engine.shard(Shift{rows, 1, of.kinds}, "ends", ends);
    engine.shards().attach_optimizer();
    auto const elements = static_cast<std::size_t>(rows * width);
    std::vector<std::vector<float>> x(depth + 3, std::vector<float>(elements));
    std::vector<Block::Saved> saved(depth);
    std::vector<float> dy(elements);
    for (int pass = 0; pass < 3 * of.micro_steps; ++pass) {
      engine.synchronize();
      for (std::size_t i = 0; i < elements; ++i)
        x[0][i] = static_cast<float>((static_cast<Index>(i) + from * width + 91 * pass) % 17 - 8) / 8;
      low.forward(x[0].data(), x[1].data());
      for (std::size_t i = 0; i < depth; ++i) blocks[i].forward(x[i + 1].data(), x[i + 2].data(), saved[i]);
      high.forward(x[depth + 1].data(), x[depth + 2].data());
      engine.compute().enqueue([&] {
        for (std::size_t i = 0; i < elements; ++i) dy[i] = (x[depth + 2][i] - 0.25f) / (global_rows * width);
      });
      auto const waits = engine.no_sync(of.waits && (pass + 1) % of.micro_steps != 0);
      high.backward(dy.data());
      for (std::size_t i = depth; i-- > 0;) blocks[i].backward(x[i + 1].data(), dy.data(), saved[i]);
      low.backward(dy.data());
      if ((pass + 1) % of.micro_steps == 0) descend(engine);
    }
    engine.synchronize();
    expect_sound(engine);
    export_full(engine, [&](fsdp::TensorInfo const& tensor, std::span<float const> values) {
      result.parameters[tensor.name] = {values.begin(), values.end()};
    });
    if (!first) return;
    result.plan = memory_plan(engine.program(), engine.plan_input());
    result.text = to_text(engine.program(), fsdp::plain_step);
    visit(engine);
  });
  return result;
}
template <class P>
Result train(Run const& of) {
  return train<P>(of, [](auto&) {});
}

using fsdp::testing::strategies_and_groups;

/// The settings beside strategy and kinds.
std::vector<std::function<void(Run&)>> const settings{
    [](Run&) {},
    [](Run& of) { of.options.prefetch = 0; },
    [](Run& of) { of.options.prefetch = 3, of.options.keep_last = false; },
    [](Run& of) { of.micro_steps = 2; },
    [](Run& of) { of.micro_steps = 2, of.waits = of.options.allow_no_sync = true; },
    [](Run& of) { of.options.prefetch = 2, of.options.allow_keep_unsharded = true; },
    [](Run& of) { of.options.max_ahead_bytes = 8000, of.options.prefetch = 2, of.options.keep_root = false; },
};

template <class P>
void compare(int ranks, std::size_t step) {
  std::size_t count = 0;
  for (auto const& strategy : strategies_and_groups(ranks))
    for (auto const& kinds : {Kinds{.frozen = true}, Kinds{.frozen = true, .skips = true}, Kinds{.apart = true},
                              Kinds{.frozen = true, .skips = true, .apart = true}})
      for (auto const& setting : settings) {
        if (count++ % step != 0) continue;
        Run of{.ranks = ranks, .strategy = strategy, .kinds = kinds};
        setting(of);
        // Where a unit is not sharded, means of micro-steps are added up in another order, and narrow sums are not
        // rounded between groups and replicas: docs/numerics.md.
        bool const narrow = !std::is_same_v<typename P::Reduce, float>;
        if (kinds.apart && ((of.micro_steps > 1 && !of.waits) || (narrow && strategy.grouped))) continue;
        INFO("ranks " << ranks << ", " << strategy.name << ", number " << count);
        auto const got = train<P>(of);
        of.kinds = {};
        auto expected = train<P>(of).parameters;
        if (kinds.frozen)  // they have the type that forward reads
          for (auto& [name, values] : expected)
            for (auto& value : values)
              if (is_base(name)) value = fsdp::widen(fsdp::narrow<typename P::Param>(value));
        CHECK(got.parameters == expected);
      }
}

}  // namespace

TEST_CASE("a module over several units has the bits of one unit whose optimizer leaves the frozen tensors out") {
  int const ranks = GENERATE(1, 2, 3, 4);
  int const every = fsdp::testing::sanitized ? 11 : 1;
  compare<fsdp::Fp32>(ranks, 3 * every);
  if (ranks == 2) compare<fsdp::Bf16Reduce>(ranks, 2 * every);
}

TEST_CASE("the same in every setting, and in bf16", "[.][units]") {
  int const ranks = GENERATE(1, 2, 3, 4);
  compare<fsdp::Fp32>(ranks, 1);
  compare<fsdp::Bf16Reduce>(ranks, 1);
}

TEST_CASE("in_fp32: parameters, gradients and masters of a tensor are never rounded") {
  int const ranks = GENERATE(1, 2);
  auto const strategy = GENERATE(fsdp::ShardingStrategy(fsdp::FullShard{}), fsdp::ShardingStrategy(fsdp::NoShard{}));
  auto const run = [&]<class P>(P) {
    return train<P>({.ranks = ranks, .strategy = strategy}, [&](auto& engine) {
      auto const shards = engine.shards();
      std::size_t apart = 0;
      for (std::size_t u = 0; u < shards.size(); ++u) {
        if (!shards[u].name().ends_with("(fp32)")) continue;
        ++apart;
        CHECK(shards[u].types() == fsdp::ElementTypes{});
        CHECK(shards[u].layout().tensors().size() == 1);
      }
      CHECK(apart == depth);
    });
  };
  auto const narrow = [](std::vector<float> const& values) {
    std::size_t count = 0;
    for (auto const value : values) count += static_cast<float>(fsdp::bf16(value)) == value ? 1u : 0u;
    return count;
  };
  auto const got = run(fsdp::Precision<fsdp::bf16, fsdp::bf16, fsdp::bf16>{});
  for (auto const& [name, values] : got.parameters) {
    INFO(name);
    if (name.ends_with("gain"))
      CHECK(narrow(values) < values.size() / 2);
    else
      CHECK(narrow(values) == values.size());
  }
  CHECK(run(fsdp::Bf16{}).parameters != got.parameters);
}

TEST_CASE("units of a module share slots by size, so gather memory is that of base and adapters") {
  auto const memory = [](Kinds kinds) { return train<fsdp::Fp32>({.ranks = 2, .kinds = kinds}).plan.gather; };
  auto const bytes = [](Index elements) { return fsdp::align_up(elements, 128) * 4; };
  auto const ends = bytes(2 * width + 24 + 2 * 64);
  auto const adapters = bytes(64 + 2 * 128);
  // Two slots, for the module that computes and for the next; the tied ends have slots of their own.
  CHECK(memory({}) == ends + 2 * bytes(64 + width * width + 2 * 128));
  CHECK(memory({.frozen = true}) == bytes(2 * width) + bytes(2 * 64) + 2 * (bytes(width * width) + adapters));
}

TEST_CASE("slots by size do not depend on the order in which modules name their tensors") {
  fsdp::StepInput input;
  input.shards = 2;
  for (std::uint32_t module = 0; module < 4; ++module) {
    bool const small_first = module % 2 == 0;
    input.units.push_back({small_first ? 1024 : 8192, "first"});
    input.units.push_back({small_first ? 8192 : 1024, "second"});
    input.units.back().first = 2 * module;
  }
  auto const program = fsdp::compile_program(input);
  fsdp::MemoryPlanInput plan;
  static_cast<fsdp::StepInput&>(plan) = input;
  CHECK(memory_plan(program, plan).gather == 4 * 2 * (1024 + 8192));
  CHECK(memory_plan(program, plan).reduce == 4 * 2 * (1024 + 8192));
}

namespace {

struct EveryKind {
  template <class T>
  struct Params {
    std::array<fsdp::Tensor<T, 1>, 4> plain;
    std::array<fsdp::Tensor<fsdp::in_fp32<T>, 1>, 4> wide;
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    for (std::size_t i = 0; i < 4; ++i) {
      fsdp::TensorOptions options{.frozen = i % 2 == 1};
      if (i > 1) options.strategy = fsdp::NoShard{};
      tensor("plain" + std::to_string(i), p.plain[i], {8}, options);
      tensor("wide" + std::to_string(i), p.wide[i], {8}, options);
    }
  }
};

}  // namespace

TEST_CASE("each kind has a unit, whose name says what differs from the module's") {
  fsdp::local::run(1, Device{}, [&](Comm comm) {
    fsdp::Mesh mesh(std::move(comm));
    fsdp::Engine engine(mesh, fsdp::FullShard{}, fsdp::Bf16{});
    (void)engine.shard(EveryKind{}, "m");
    (void)engine.shard(EveryKind{}, "f", {.strategy = fsdp::NoShard{}, .frozen = true});
    engine.seal();
    std::vector<std::string> names;
    for (std::size_t u = 0; u < engine.shards().size(); ++u) names.push_back(engine.shards()[u].name());
    CHECK(names == std::vector<std::string>{"m", "m (fp32)", "m (frozen)", "m (frozen, fp32)", "m (no_shard)",
                                            "m (fp32, no_shard)", "m (frozen, no_shard)", "m (frozen, fp32, no_shard)",
                                            "f", "f (fp32)"});
    CHECK(engine.shards()[9].layout().tensors().size() == 4);
  });
}

TEST_CASE("a module's units are gathered, dropped and reduced together") {
  auto const text = train<fsdp::Fp32>({.ranks = 2, .kinds = {.frozen = true, .skips = true}}).text;
  CHECK(has(text, "forward    h.2  | all-gather h.3->"));
  CHECK(has(text, ", all-gather h.3 (frozen)->"));
  CHECK(has(text, "| close h.2->"));
  CHECK(has(text, ", close h.2 (frozen)->"));
  CHECK(has(text, "reduce-scatter h.2, "));
  CHECK_FALSE(has(text, "reduce-scatter h.2 (frozen)"));
}

TEST_CASE("a frozen bf16 parameter takes two bytes over the ranks, and is gathered as it is") {
  for (int const ranks : {1, 2, 3}) {
    auto const frozen = train<fsdp::Bf16>({.ranks = ranks, .kinds = {.frozen = true, .skips = true}}, [](auto& engine) {
      std::size_t kept = 0;
      for (std::size_t u = 0; u < engine.shards().size(); ++u) {
        auto const& unit = engine.shards()[u];
        if (!unit.name().ends_with("(frozen)")) continue;
        ++kept;
        CHECK(unit.types().master == fsdp::DType::bf16);
        CHECK((unit.master == nullptr && unit.gradient == nullptr && unit.shard_data != nullptr));
      }
      CHECK(kept == depth + 1);
    });
    auto const padded = [&](Index elements) { return fsdp::align_up(elements, 64 * ranks); };
    auto const base = padded(2 * width) + depth * padded(width * width);
    auto const adapters = padded(2 * 64) + depth * padded(2 * 128), gains = depth * padded(width);
    CHECK(frozen.plan.parameters * ranks == 2 * base + 4 * (adapters + gains));
    CHECK(frozen.plan.gradients * ranks == 4 * (adapters + gains));
    CHECK(frozen.plan.optimizer * ranks == 8 * (adapters + gains));
  }
}

namespace {

/// A table that does not train, and nothing else; or a gain that does, too.
struct Tied {
  bool trains;
  template <class T>
  struct Params {
    fsdp::Tensor<T, 1> table, gain;
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor("table", p.table, {100}, fsdp::frozen);
    if (trains) tensor("gain", p.gain, {10}, fsdp::no_decay);
  }
  void forward(Stream&, Params<float const> const&) const {}
  bool backward(Stream&, Params<float const> const&, Params<float> const& g) const {
    return g.table.wanted() || trains;
  }
};

}  // namespace

TEST_CASE("backward ends at the lowest module that trains, though units of lower modules have tensors that do") {
  auto const strategy = GENERATE(fsdp::ShardingStrategy(fsdp::FullShard{}), fsdp::ShardingStrategy(fsdp::NoShard{}));
  fsdp::local::run(2, Device{}, [&](Comm comm) {
    bool const first = comm.rank() == 0;
    fsdp::Mesh mesh(std::move(comm));
    fsdp::Engine engine(mesh, strategy);
    auto const ends = engine.add_unit("ends");
    auto low = engine.shard(Tied{false}, "ends", ends);
    auto middle = engine.shard(Tied{false}, "middle");
    auto high = engine.shard(Tied{true}, "high");
    auto head = engine.shard(Tied{true}, "ends", ends);
    fsdp::AdamW adamw(engine);
    for (int step = 0; step < 2; ++step) {
      low.forward(), middle.forward(), high.forward(), head.forward();
      bool const trained = head.backward() && high.backward();
      bool const skipped = !middle.backward() && !low.backward();
      if (first) CHECK((trained && skipped));
      adamw.step();
    }
    expect_sound(engine, 2);
    if (first) CHECK(engine.program().backward_end() == 2);
    if (first) CHECK_FALSE(has(to_text(engine.program()), "backward   middle"));
  });
}

namespace {

template <class P>
std::map<std::string, std::vector<float>> saved(int ranks, Kinds kinds, std::filesystem::path const& folder, bool load,
                                                bool optimizer = true) {
  std::map<std::string, std::vector<float>> parameters;
  fsdp::local::run(ranks, Device{}, [&](Comm comm) {
    fsdp::Mesh mesh(std::move(comm));
    fsdp::Engine engine(mesh, fsdp::FullShard{}, P{}, {.seed = load ? 5u : 4u});
    auto layers = engine.shard(std::vector(2, Block(1, kinds)), "h");
    fsdp::AdamW<decltype(engine)> adamw(engine);
    if (load && optimizer) fsdp::load(engine, adamw, folder / "step-7");
    if (load && !optimizer) fsdp::load(engine, folder / "step-7");
    if (!load) fsdp::save(engine, adamw, folder, nullptr, {.step = 7});
    export_full(engine, [&](fsdp::TensorInfo const& tensor, std::span<float const> values) {
      parameters[tensor.name] = {values.begin(), values.end()};
    });
  });
  return parameters;
}

}  // namespace

TEST_CASE("checkpoints keep each tensor in its unit's type, and load into other kinds") {
  fsdp::testing::TemporaryFolder const folder;
  Kinds const frozen{.frozen = true, .skips = true};
  auto const mixed = saved<fsdp::Bf16>(3, frozen, folder.path, false);
  CHECK(saved<fsdp::Bf16>(2, frozen, folder.path, true) == mixed);
  CHECK(saved<fsdp::Fp32>(1, frozen, folder.path, true) == mixed);
  CHECK(saved<fsdp::Fp32>(2, {}, folder.path, true, false) == mixed);
  CHECK(has(what([&] { saved<fsdp::Fp32>(2, {}, folder.path, true); }), "h.0.weight"));
  using Narrow = fsdp::Precision<fsdp::bf16, fsdp::bf16, fsdp::bf16>;
  fsdp::testing::TemporaryFolder const other;
  auto const narrow = saved<Narrow>(2, {.apart = true}, other.path, false);
  CHECK(saved<Narrow>(3, {}, other.path, true) == narrow);
  CHECK(saved<fsdp::Fp32>(2, {.frozen = true}, other.path, true) == narrow);
}

namespace {

/// Registers two modules in one unit, and what `declare` says.
template <class Declare>
std::vector<std::string> refusals(int ranks, Declare const& declare) {
  std::vector<std::string> texts(static_cast<std::size_t>(ranks));
  fsdp::local::run(ranks, Device{}, [&](Comm comm) {
    auto const rank = comm.rank();
    fsdp::Mesh mesh(std::move(comm));
    fsdp::Engine engine(mesh, fsdp::FullShard{}, fsdp::Bf16{});
    texts[static_cast<std::size_t>(rank)] = what([&] {
      declare(engine, rank);
      engine.seal();
    });
  });
  return texts;
}

}  // namespace

TEST_CASE("a tied tensor must be of one kind in all its uses") {
  auto const texts = refusals(1, [](auto& engine, int) {
    auto const unit = engine.add_unit("ends");
    (void)engine.shard(Shift{1, 0, {.frozen = true}}, "ends", unit);
    (void)engine.shard(Shift{1, 1, {}}, "ends", unit);
  });
  CHECK(has(texts[0],
            "rank 0: tensor 'ends.table' is in unit 'ends' and in unit 'ends (frozen)': modules that share a tensor "
            "declare it with the same TensorOptions::frozen and strategy"));
}

TEST_CASE("a module that is refused leaves nothing behind") {
  fsdp::local::run(1, Device{}, [&](Comm comm) {
    fsdp::Mesh mesh(std::move(comm));
    auto compute = Stream::inline_stream("compute");
    fsdp::Engine engine(mesh, fsdp::FullShard{}, {}, compute);
    auto const ends = engine.add_unit("ends");
    auto low = engine.shard(Shift{1, 0, {.frozen = true}}, "ends", ends);
    auto const before = to_text(engine.shards());
    CHECK(has(what([&] { (void)engine.shard(Shift{1, 1, {}}, "ends", ends); }), "tensor 'ends.table' is in unit"));
    CHECK(has(what([&] { (void)engine.shard(Shift{1, 1, {}}, "ends"); }), "already has a unit 'ends'"));
    float* w = nullptr;
    fsdp::TensorOptions const elsewhere{.strategy = fsdp::HybridShard<>{.group = 1}};
    CHECK(has(what([&] { fsdp::AdoptedUnit(engine, "a", {{"w", &w, nullptr, {3}, elsewhere}}); }), "hybrid_shard"));
    CHECK(has(what([&] { fsdp::AdoptedUnit(engine, "a", {{"w", &w, nullptr, {3}, {}, -1}}); }), "slice"));
    CHECK(has(what([&] { fsdp::AdoptedUnit(engine, "a", {{"ends.table", &w, nullptr, {3}}}); }), "both have a tensor"));
    CHECK(to_text(engine.shards()) == before);
    fsdp::AdoptedUnit adopted(engine, "a", {{"w", &w, nullptr, {3}}});
    auto high = engine.shard(Shift{1, 1, {.frozen = true}}, "ends", ends);
    fsdp::Sgd sgd(engine);
    std::vector<std::string> names;
    export_full(engine, [&](fsdp::TensorInfo const& tensor, std::span<float const>) { names.push_back(tensor.name); });
    CHECK(names == std::vector<std::string>{"ends.first", "ends.second", "ends.table", "w"});
  });
}

TEST_CASE("imports give a tensor on all ranks, or leave it as it is on all") {
  auto const import = [](fsdp::ShardingStrategy const& strategy, int giving) {
    std::string text;
    fsdp::local::run(2, Device{}, [&](Comm comm) {
      bool const first = comm.rank() == 0;
      fsdp::Mesh mesh(std::move(comm));
      fsdp::Engine engine(mesh, strategy);
      auto layer = engine.shard(Block(1, {}), "h");
      engine.seal();
      auto const why = what([&] {
        fsdp::import_shard(engine, [&](fsdp::TensorInfo const& tensor, Index, std::span<float> out) {
          for (auto& value : out) value = 2;
          return !tensor.name.ends_with("weight") || engine.rank() < giving;
        });
      });
      if (first) text = why;
    });
    return text;
  };
  CHECK(import(fsdp::FullShard{}, 2) == "nothing was thrown");
  CHECK(import(fsdp::FullShard{}, 0) == "nothing was thrown");
  CHECK(has(import(fsdp::FullShard{}, 1),
            "tensor 'h.weight' was given on rank 0 and left as it is on rank 1. Give it on all ranks or on none"));
  CHECK(has(import(fsdp::NoShard{}, 1), "tensor 'h.weight' was given on rank 0 and left as it is on rank 1"));
}

TEST_CASE("ranks that differ in kinds are told, on all ranks") {
  auto const kinds = GENERATE(Kinds{.frozen = true}, Kinds{.apart = true});
  auto const texts =
      refusals(3, [&](auto& engine, int rank) { (void)engine.shard(Block(1, rank == 1 ? kinds : Kinds{}), "h"); });
  for (auto const& text : texts) {
    CHECK(has(text, "ranks disagree: rank 0 has \"module 'h': tensor 'h."));
    CHECK(has(text, kinds.frozen ? "in unit 'h (frozen)'" : "in unit 'h (no_shard)'"));
  }
}

TEST_CASE("all tensors frozen one by one are refused too") {
  fsdp::local::run(1, Device{}, [&](Comm comm) {
    fsdp::Mesh mesh(std::move(comm));
    auto compute = Stream::inline_stream("compute");
    fsdp::Engine engine(mesh, fsdp::FullShard{}, {}, compute);
    float* w = nullptr;
    fsdp::AdoptedUnit unit{engine, "all", {{"w", &w, nullptr, {3}, fsdp::frozen}}};
    CHECK(has(what([&] { engine.seal(); }), "all units with parameters are frozen; at least one must train"));
  });
}
