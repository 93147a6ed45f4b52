// SPDX-License-Identifier: Apache-2.0
// Frozen units: the others train as if an optimizer left them out, and nothing is kept, reduced or gathered for them in
// vain.
// full-run: [frozen]
// timeout: 1800
// skip-sanitizers
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/checkpoint.hpp"
#include "fsdp/detail/step/check_program.hpp"
#include "tests/catch.hpp"
#include "tests/support/counting.hpp"
#include "tests/support/descend.hpp"
#include "tests/support/local_run.hpp"
#include "tests/support/messages.hpp"
#include "tests/support/sanitized.hpp"
#include "tests/support/shard_group.hpp"
#include "tests/support/strategies.hpp"
#include "tests/support/temporary_folder.hpp"

namespace {

using Device = fsdp::host::Device;
using Comm = fsdp::local::Communicator<Device>;
using Engine = fsdp::Engine<Comm>;
using fsdp::testing::Descend;
using fsdp::testing::has;
using fsdp::testing::what;

struct Case {
  std::vector<std::size_t> frozen;  ///< units
  toy::Run run;
};

/// Gradient descent. @param freeze  false: all units have gradients, and the optimizer leaves the frozen ones out
template <class E>
void descend(E& engine, Case const& of, bool freeze, toy::Network<E>& network) {
  auto const shards = engine.shards();
  std::vector<bool> left_out(shards.size());
  for (auto const u : of.frozen) left_out[u] = true;
  if (freeze)
    for (auto const u : of.frozen) shards[u].frozen = true;
  shards.attach_optimizer();
  for (int step = 0; step < of.run.steps; ++step) {
    if (of.run.evaluate_every > 0 && step % of.run.evaluate_every == 0) {
      auto const scope = engine.evaluation();
      network.forward(1000 + step);
    }
    for (int micro = 0; micro < of.run.micro_steps; ++micro) {
      auto const waits = engine.no_sync(of.run.sync_last_only && micro + 1 < of.run.micro_steps);
      network.step(step * of.run.micro_steps + micro);
    }
    fsdp::testing::descend(engine, left_out, 0.1f);
  }
}
/// Calls `train(engine, network)` on each rank. @return the full parameters
template <class Train>
std::vector<float> trained_by(fsdp::ShardingStrategy const& strategy, int ranks, Case const& of, Train const& train) {
  std::vector<float> result;
  fsdp::local::run(ranks, Device{}, [&](Comm comm) {
    bool const first = comm.rank() == 0;
    fsdp::Mesh mesh(std::move(comm));
    Engine engine(mesh, strategy, of.run.options);
    toy::Network network(engine, of.run.shape);
    train(engine, network);
    auto parameters = toy::parameters(engine);
    if (first) result = std::move(parameters);
  });
  return result;
}
std::vector<float> trained(fsdp::ShardingStrategy const& strategy, int ranks, Case const& of, bool freeze) {
  return trained_by(strategy, ranks, of, [&](Engine& engine, auto& network) {
    descend(engine, of, freeze, network);
    if (auto const problem = check_program(engine.program(), engine.plan_input()); !problem.empty())
      throw std::logic_error(problem + "\n" + to_text(engine.program()));
    if (engine.shards().late_events() != 0) throw std::logic_error("an event is late");
    auto const plan = memory_plan(engine.program(), engine.plan_input());
    if (plan.reserved() - plan.optimizer != engine.account().reserved_state())
      throw std::logic_error("the account is not as planned");
  });
}

/// Units: the root, which the first and the last use share, and four blocks.
std::vector<std::vector<std::size_t>> const patterns{{0}, {1, 2}, {0, 1, 2}, {0, 1, 2, 3}, {4}, {2, 4}};

using fsdp::testing::strategies;
using fsdp::testing::strategies_in_turn;

}  // namespace

namespace {

/// @param all  every strategy has every kind of run; else they take turns
void compare_with_left_out(int ranks, int prefetch, std::vector<toy::Setting> const& settings, bool all) {
  std::size_t count = 0;
  int pattern = 0;
  for (auto const& frozen : patterns) {
    ++pattern;
    for (int const kind : {0, 1, 2, 3}) {
      for (auto const& strategy : all ? strategies(ranks) : strategies_in_turn(ranks, ranks + kind, pattern)) {
        if (!fsdp::testing::next_cell(7)) continue;
        Case of{frozen, {}};
        of.run.steps = 3;
        of.run.options.prefetch = prefetch;
        of.run.shape.setting = settings[count++ % settings.size()];
        of.run.micro_steps = kind == 0 ? 1 : 2;
        of.run.sync_last_only = of.run.options.allow_no_sync = kind == 2;
        if (kind == 3) of.run.evaluate_every = 2, of.run.options.keep_last = false, of.run.options.keep_root = false;
        INFO("ranks " << ranks << ", prefetch " << prefetch << ", " << strategy.name << ", frozen "
                      << fsdp::listed(frozen) << ", kind " << kind);
        CHECK(trained(strategy, ranks, of, true) == trained(strategy, ranks, of, false));
      }
    }
  }
}

}  // namespace

TEST_CASE("frozen units stay as they are, and the others train as if an optimizer left them out") {
  int const ranks = GENERATE(1, 2, 3, 4);
  compare_with_left_out(ranks, 1, {toy::Setting::every, toy::Setting::none, toy::Setting::even_layers}, false);
}

TEST_CASE("frozen units stay, and the others train alone, with every prefetch depth and all ways to begin gradients",
          "[.][frozen]") {
  int const ranks = GENERATE(1, 2, 3, 4);
  int const prefetch = GENERATE(0, 1, 2, 3);
  auto const setting = GENERATE(toy::Setting::none, toy::Setting::every, toy::Setting::ends, toy::Setting::even_layers);
  compare_with_left_out(ranks, prefetch, {setting}, true);
}

TEST_CASE("parameters of frozen units may stay unsharded between micro-steps") {
  int const ranks = GENERATE(1, 2);
  for (auto const& frozen : patterns) {
    std::vector<std::vector<float>> results;
    for (bool const keep : {false, true}) {
      fsdp::local::run(ranks, Device{}, [&](Comm comm) {
        bool const first = comm.rank() == 0;
        fsdp::Mesh mesh(std::move(comm));
        Engine engine(mesh, fsdp::FullShard{}, {.allow_keep_unsharded = keep});
        toy::Network network(engine, {});
        for (auto const u : frozen) engine.shards()[u].frozen = true;
        fsdp::AdamW adamw(engine);
        for (int step = 0; step < 3; ++step) {
          for (int micro = 0; micro < 3; ++micro) {
            auto const kept = engine.keep_unsharded(keep && micro < 2);
            network.step(3 * step + micro);
          }
          adamw.step(clip_grad_norm(engine, 1.0f));
        }
        if (auto const problem = check_program(engine.program(), engine.plan_input()); !problem.empty())
          throw std::logic_error(problem);
        auto parameters = toy::parameters(engine);
        if (first) results.push_back(std::move(parameters));
      });
    }
    INFO("frozen " << fsdp::listed(frozen));
    CHECK(results[0] == results[1]);
  }
}

TEST_CASE("nothing is gathered, reduced or kept in vain for frozen units") {
  using Counted = toy::Counting<Comm>;
  for (auto const& frozen : patterns) {
    fsdp::local::run(2, Device{}, [&](Comm comm) {
      auto tally = std::make_shared<toy::Tally>();
      bool const first = comm.rank() == 0;
      fsdp::Mesh<Counted> mesh(Counted(std::move(comm), tally));
      fsdp::Engine<Counted> engine(mesh, fsdp::ShardGradOp{}, {.keep_last = false});
      toy::Network network(engine, {});
      for (auto const u : frozen) engine.shards()[u].frozen = true;
      fsdp::AdamW adamw(engine);
      network.step(0);
      adamw.step(clip_grad_norm(engine, 1.0f));
      tally->entries.clear();
      network.step(1);
      auto const live = engine.account().live(fsdp::MemoryTag::gather);
      adamw.step();
      engine.synchronize();
      std::int64_t trains = 0, moments = 0, units = 0;
      for (std::size_t u = 0; u < engine.shards().size(); ++u) {
        auto const& unit = engine.shards()[u];
        ++units;
        trains += unit.trains() ? 1 : 0;
        moments += unit.trains() ? 2 * 4 * unit.shard_numel() : 0;
      }
      if (!first) return;
      CHECK(tally->count("reduce_scatter") == static_cast<std::size_t>(trains));
      CHECK(tally->count("all_gather", "forward") == static_cast<std::size_t>(units));
      // ShardGradOp keeps what backward needs; below the lowest trained use, units are dropped and not gathered again.
      CHECK(tally->count("all_gather", "backward") == 0);
      CHECK(engine.account().reserved(fsdp::MemoryTag::optimizer) == moments);
      auto const end = engine.program().backward_end();
      CHECK(end == (frozen[0] != 0 ? 0u : frozen.size() == 1 ? 1u : frozen.size()));
      CHECK(live == 0);
      // Slots of gradients: the root's, two for blocks, and scratch for the largest frozen unit that backward comes to.
      std::int64_t blocks = 0, reduce = 0, scratch = 0;
      for (std::size_t u = 0; u < engine.shards().size(); ++u) {
        auto const& unit = engine.shards()[u];
        auto const bytes = unit.full_numel() * 4;
        if (unit.frozen && engine.program().units[u].in_backward) scratch = std::max(scratch, bytes);
        if (unit.trains() && (u == 0 || ++blocks <= 2)) reduce += bytes;
      }
      CHECK(engine.account().reserved(fsdp::MemoryTag::reduce) == reduce + scratch);
    });
  }
}

namespace {

/// Steps of AdamW that are clipped. @param freeze  false: all units train, but gradients of the frozen ones become zero
std::vector<float> clipped(fsdp::ShardingStrategy const& strategy, int ranks, Case const& of, bool freeze) {
  return trained_by(strategy, ranks, of, [&](Engine& engine, auto& network) {
    auto const shards = engine.shards();
    for (auto const u : of.frozen) {
      if (freeze)
        shards[u].frozen = true;
      else
        shards.on_reduced(shards[u], [&engine](auto& stream, std::span<float> gradients) {
          engine.device().zero_async(stream, gradients.data(), gradients.size_bytes());
        });
    }
    fsdp::AdamW adamw(engine, {.lr = 1e-2f, .weight_decay = 0.0f});
    for (int step = 0; step < of.run.steps; ++step) {
      for (int micro = 0; micro < of.run.micro_steps; ++micro) network.step(step * of.run.micro_steps + micro);
      adamw.step(clip_grad_norm(engine, step % 2 == 0 ? 1e-3f : 1e3f));
    }
  });
}

/// @param all  every strategy has every pattern with both numbers of micro-steps; else they take turns
void compare_clipped(bool all) {
  for (int const ranks : {1, 2, 3, 4}) {
    int pattern = 0;
    for (auto const& frozen : patterns) {
      ++pattern;
      for (int const micro_steps : {1, 2}) {
        auto const row = ranks + micro_steps;
        for (auto const& strategy : all ? strategies(ranks) : strategies_in_turn(ranks, row, pattern)) {
          Case of{frozen, {}};
          of.run.steps = 4;
          of.run.micro_steps = micro_steps;
          INFO(ranks << " ranks, " << strategy.name << ", frozen " << fsdp::listed(frozen));
          CHECK(clipped(strategy, ranks, of, true) == clipped(strategy, ranks, of, false));
        }
      }
    }
  }
}

}  // namespace

TEST_CASE("clipped steps have the bits of a run in which the frozen units have gradients of zero") {
  compare_clipped(false);
}

TEST_CASE("clipped steps have the bits of gradients of zero under every strategy, whatever is frozen", "[.][frozen]") {
  compare_clipped(true);
}

TEST_CASE("the norm leaves frozen units out, and clipped steps are the same on any number of ranks") {
  for (auto const& frozen : patterns) {
    std::vector<std::vector<float>> results;
    for (int const ranks : {1, 2, 3}) {
      fsdp::local::run(ranks, Device{}, [&](Comm comm) {
        bool const first = comm.rank() == 0;
        fsdp::Mesh mesh(std::move(comm));
        Engine engine(mesh, fsdp::FullShard{});
        toy::Network network(engine, {});
        for (auto const u : frozen) engine.shards()[u].frozen = true;
        fsdp::AdamW adamw(engine, {.lr = 1e-2f, .weight_decay = 0.1f});
        for (int step = 0; step < 4; ++step) {
          network.step(step);
          auto const norm = clip_grad_norm(engine, 1e-3f);
          double sum = 0.0;
          fsdp::export_gradients(engine, [&](fsdp::TensorInfo const&, std::span<float const> values) {
            for (auto const value : values) sum += static_cast<double>(value) * static_cast<double>(value);
          });
          if (first) CHECK(norm.value() == Approx(std::sqrt(sum)).epsilon(1e-12));
          adamw.step(norm);
        }
        auto parameters = toy::parameters(engine);
        if (first) results.push_back(std::move(parameters));
      });
    }
    for (auto const& other : results)
      for (std::size_t i = 0; i < other.size(); ++i) CHECK(other[i] == Approx(results[0][i]).margin(1e-4));
  }
}

namespace {

/// y = w x, element by element; says which gradients it wrote.
struct Scale {
  static constexpr bool skips_gradients = true;
  Device device;
  std::int64_t width;
  template <class T>
  struct Params {
    fsdp::Tensor<T, 1> w;
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor("w", p.w, {width}, fsdp::TensorOptions{.init = fsdp::init::constant(2.0f)});
  }
  void forward(fsdp::host::Stream&, Params<float const> const&) const {}
  /// @return 1: the gradient was wanted; -1: not
  int backward(fsdp::host::Stream& stream, Params<float const> const&, Params<float> const& g) const {
    if (!g.w.wanted()) return -1;
    device.launch(stream, 1, Descend{}, g.w.data, static_cast<float const*>(g.w.data), std::int64_t{0}, 0.0f);
    return 1;
  }
};

}  // namespace

TEST_CASE("backward ends at the lowest unit that trains, and modules may skip frozen gradients") {
  for (int const ranks : {1, 2}) {
    fsdp::local::run(ranks, Device{}, [&](Comm comm) {
      bool const first = comm.rank() == 0;
      fsdp::Mesh mesh(std::move(comm));
      Engine engine(mesh, fsdp::FullShard{});
      Scale const scale{engine.device(), 100};
      auto low = engine.shard(std::vector<Scale>{scale, scale}, "low", {.frozen = true});
      auto middle = engine.shard(scale, "middle");
      auto high = engine.shard(scale, "high", {.strategy = fsdp::NoShard{}, .frozen = true});
      float *w = nullptr, *g = nullptr;
      fsdp::AdoptedUnit<Engine> top(engine, "top", {{"top.w", &w, &g, {100}}},
                                    {.kernels_are_enqueued = true, .frozen = true});
      fsdp::AdamW adamw(engine);
      for (int step = 0; step < 2; ++step) {
        for (auto& module : low) module.forward();
        middle.forward();
        high.forward();
        {
          auto const full = top.forward();
          if (first) CHECK((full && w != nullptr));
        }
        if (first) CHECK(has(what([&] { low[1].backward(); }), "expected backward of 'top', got backward of 'low.1'"));
        {
          auto const full = top.backward();
          if (first) CHECK((full && g != nullptr));  // scratch: its kernels write gradients
        }
        int const of_high = high.backward(), of_middle = middle.backward();
        int const of_low = low[1].backward() + low[0].backward();
        if (first) CHECK((of_high == -1 && of_middle == 1 && of_low == 0));
        adamw.step(clip_grad_norm(engine, 1.0f));
      }
      auto const plan = memory_plan(engine.program(), engine.plan_input());
      if (first) CHECK(plan.reserved() == engine.account().reserved_state());
      if (first) CHECK(engine.program().scratch_bytes == 4 * engine.shards()[4].full_numel());
      if (first) CHECK(engine.shards()[0].gradient == nullptr);
    });
  }
}

namespace {

/// A Scale that writes all gradients.
struct PlainScale : Scale {
  static constexpr bool skips_gradients = false;
  PlainScale(Device const& on, std::int64_t count) : Scale{on, count} {}
};

}  // namespace

TEST_CASE("modules that skip gradients and modules that do not may share a frozen unit") {
  fsdp::local::run(2, Device{}, [&](Comm comm) {
    bool const first = comm.rank() == 0;
    fsdp::Mesh mesh(std::move(comm));
    Engine engine(mesh, fsdp::FullShard{});
    auto low = engine.shard(Scale{engine.device(), 100}, "low");
    auto const unit = engine.add_unit("mixed", {.frozen = true});
    auto skips = engine.shard(Scale{engine.device(), 100}, "skips", unit);
    auto writes = engine.shard(PlainScale(engine.device(), 100), "writes", unit);
    fsdp::AdamW adamw(engine);
    low.forward(), skips.forward(), writes.forward();
    int const of_writes = writes.backward(), of_skips = skips.backward(), of_low = low.backward();
    if (first) CHECK((of_writes == 1 && of_skips == -1 && of_low == 1));
    if (first) CHECK(engine.program().scratch_bytes == 4 * engine.shards()[1].full_numel());
    adamw.step();
  });
}

namespace {

/// No parameters; counts its backward passes.
struct Nothing {
  template <class T>
  struct Params {};
  template <class T, class Visit>
  void describe(Params<T>&, Visit&&) const {}
  void forward(fsdp::host::Stream&, Params<float const> const&) const {}
  int backward(fsdp::host::Stream&, Params<float const> const&, Params<float> const&) const { return 1; }
};

}  // namespace

TEST_CASE("backward comes to modules without parameters, unless it ends above them") {
  auto const reached = [](bool below, bool between) {
    int result = 0;
    fsdp::local::run(1, Device{}, [&](Comm comm) {
      fsdp::Mesh mesh(std::move(comm));
      Engine engine(mesh, fsdp::FullShard{});
      auto nothing = engine.shard(Nothing{}, "nothing");
      auto low = engine.shard(Scale{engine.device(), 100}, "low", {.frozen = below});
      auto other = engine.shard(Nothing{}, "other");
      auto middle = engine.shard(Scale{engine.device(), 100}, "middle", {.frozen = between});
      auto high = engine.shard(Scale{engine.device(), 100}, "high");
      nothing.forward(), low.forward(), other.forward(), middle.forward(), high.forward();
      high.backward(), middle.backward();
      result = other.backward() * 10;
      low.backward();
      result += nothing.backward();
    });
    return result;
  };
  CHECK(reached(false, false) == 11);  // nothing is frozen: gradients of inputs are computed
  CHECK(reached(false, true) == 11);
  CHECK(reached(true, false) == 10 * 0 + 0);
}

TEST_CASE("an adopted frozen unit below the lowest trained one leaves its pointers null in backward") {
  fsdp::local::run(1, Device{}, [&](Comm comm) {
    fsdp::Mesh mesh(std::move(comm));
    auto compute = fsdp::host::Stream::inline_stream("compute");
    Engine engine(mesh, fsdp::FullShard{}, {}, compute);
    float *w = nullptr, *g = nullptr, *v = nullptr, *h = nullptr;
    fsdp::AdoptedUnit<Engine> low(engine, "low", {{"low.w", &w, &g, {10}}}, {.frozen = true});
    fsdp::AdoptedUnit<Engine> high(engine, "high", {{"high.w", &v, &h, {10}}});
    auto const frozen_again = [&] {
      fsdp::AdoptedUnit<Engine> tied(engine, high.unit(), "tied", {{"high.w", &v, &h, {10}}}, {.frozen = true});
    };
    CHECK(has(what(frozen_again), "adopted unit 'tied' is a further use of a unit"));
    fsdp::AdamW adamw(engine);
    for (int step = 0; step < 2; ++step) {
      if (auto full = low.forward()) CHECK(w != nullptr);
      if (auto full = high.forward()) CHECK(v != nullptr);
      if (auto full = high.backward()) CHECK(h != nullptr);
      bool const inside = static_cast<bool>(low.backward());
      CHECK(!inside);
      CHECK((w == nullptr && g == nullptr));
      adamw.step();
    }
    auto const update = [&] {
      engine.shards().begin_step("by hand", 0.1f);
      auto const now = engine.shards().update(engine.shards()[0]);
    };
    if (auto full = low.forward()) CHECK(w != nullptr);
    if (auto full = high.forward()) CHECK(v != nullptr);
    if (auto full = high.backward()) CHECK(h != nullptr);
    CHECK(has(what(update), "update of unit 'low', which is frozen"));
  });
}

TEST_CASE("an engine in which nothing trains, or ranks that differ in what is frozen, are refused") {
  auto const seal = [](int ranks, auto const& frozen) {
    return what([&] {
      fsdp::local::run(ranks, Device{}, [&](Comm comm) {
        int const rank = comm.rank();
        fsdp::Mesh mesh(std::move(comm));
        Engine engine(mesh, fsdp::FullShard{});
        toy::Network network(engine, {});
        for (std::size_t u = 0; u < 5; ++u) engine.shards()[u].frozen = frozen(rank, u);
        engine.seal();
      });
    });
  };
  CHECK(has(seal(2, [](int, std::size_t) { return true; }), "all units with parameters are frozen"));
  CHECK(has(seal(2, [](int rank, std::size_t u) { return rank == 1 && u == 2; }), "layers.1"));
}

TEST_CASE("checkpoints of frozen units keep their parameters, and no optimizer state") {
  fsdp::testing::TemporaryFolder const folder;
  auto const train = [&](int ranks, bool freeze, bool load_state, std::string const& from, std::string const& to) {
    std::vector<float> result;
    fsdp::local::run(ranks, Device{}, [&](Comm comm) {
      bool const first = comm.rank() == 0;
      fsdp::Mesh mesh(std::move(comm));
      Engine engine(mesh, fsdp::FullShard{});
      toy::Network network(engine, {});
      if (freeze) engine.shards()[1].frozen = engine.shards()[2].frozen = true;
      fsdp::AdamW adamw(engine);
      if (!from.empty()) {
        if (load_state)
          fsdp::load_latest(engine, adamw, folder.path / from);
        else
          fsdp::load(engine, folder.path / from / "step-3");
      }
      for (int step = 0; step < 3; ++step) {
        network.step(step);
        adamw.step();
      }
      fsdp::save(engine, adamw, folder.path / to, nullptr, {.step = 3});
      auto parameters = toy::parameters(engine);
      if (first) result = std::move(parameters);
    });
    return result;
  };
  train(2, false, true, "", "full");
  auto const once = train(2, true, true, "full", "frozen");
  CHECK(train(2, true, true, "full", "again") == once);
  CHECK(train(1, true, true, "frozen", "one").size() == once.size());
  auto const whole = train(3, false, false, "frozen", "whole");
  CHECK(train(3, false, false, "frozen", "whole2") == whole);
  CHECK(has(what([&] { train(2, false, true, "frozen", "none"); }), "frozen"));
}
