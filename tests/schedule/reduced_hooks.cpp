// SPDX-License-Identifier: Apache-2.0
// Shards::on_reduced: a function is called once for each reduction of its unit, behind it, with the gradient shard that
// optimizers see. What it changes is what a run changes by hand between backward and step.
// skip-sanitizers
// full-run: [hooks]
// timeout: 1800
#include <fmt/format.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/detail/step/check_program.hpp"
#include "fsdp/fsdp.hpp"
#include "fsdp/full_state.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"
#include "tests/catch.hpp"
#include "tests/support/messages.hpp"
#include "tests/support/ramp.hpp"
#include "tests/support/strategies.hpp"
#include "tests/support/toy_model.hpp"

namespace {

using fsdp::host::Stream;
using fsdp::testing::has;
using fsdp::testing::Ramp;
using fsdp::testing::refusal;
using fsdp::testing::what;
using Device = fsdp::host::Device;
using Comm = fsdp::local::Communicator<Device>;
using Engine = fsdp::Engine<Comm>;

[[noreturn]] void wrong(std::string const& text) { throw std::logic_error(text); }

/// Units differ in how they are changed. Neither of the two commutes with all of: a mean, a sum, another call.
float changed(std::size_t unit, float g) { return unit % 2 == 0 ? std::clamp(g, -2e-3f, 2e-3f) : g * -2.0f; }
struct Change {
  template <class Block>
  FSDP_HD void operator()(Block const& block, std::int64_t, float* g, std::int64_t n, std::size_t unit) const {
    if (block.thread() != 0) return;
    for (std::int64_t i = 0; i < n; ++i) g[i] = changed(unit, g[i]);
  }
};

enum class MicroSteps { one, all_reduce, last_reduces, last_replicates };
enum class By { nobody, hooks, hand };

struct Case {
  int ranks = 1;
  fsdp::ShardingStrategy strategy = fsdp::FullShard{};
  MicroSteps micro_steps{};
  toy::Shape shape{};
  fsdp::EngineOptions options{};
  bool every_unit = true;  ///< false: every second one

  bool is_hooked(std::size_t unit) const { return every_unit || unit % 2 == 1; }
  int count() const { return micro_steps == MicroSteps::one ? 1 : 3; }
};

/// Whether a micro-step completes the reduction of a unit.
template <class Unit>
bool reduces(Case const& of, Unit const& unit, int micro) {
  if (micro + 1 == of.count() || of.micro_steps == MicroSteps::all_reduce) return true;
  return of.micro_steps == MicroSteps::last_replicates && unit.placement().replicas == 1;
}

/// Observations of a hook, by unit.
struct Seen {
  int calls = 0;
  std::vector<float> gradients{};
};

/// Trains, and calls `look(engine, seen)` before each step.
/// @return rank 0's full parameters
template <class P, class Look>
std::vector<float> train(Case const& of, By by, Look const& look) {
  std::vector<float> result;
  fsdp::local::run(of.ranks, Device{}, [&](Comm comm) {
    using E = fsdp::Engine<Comm, P>;
    bool const first = comm.rank() == 0;
    fsdp::Mesh mesh(std::move(comm));
    E engine(mesh, of.strategy, of.options);
    toy::Network network(engine, of.shape);
    auto const shards = engine.shards();
    std::vector<Seen> seen(shards.size());
    for (std::size_t u = 0; by != By::hand && u < shards.size(); ++u) {
      if (!of.is_hooked(u)) continue;
      shards.on_reduced(fsdp::UnitId{u}, [&seen, u, device = engine.device()](Stream& stream, std::span<float> g) {
        ++seen[u].calls;
        seen[u].gradients.resize(g.size());
        device.copy_async(stream, seen[u].gradients.data(), g.data(), g.size_bytes());
      });
      if (by == By::nobody) continue;
      // A function of another type, which cannot be copied.
      shards.on_reduced(shards[u], [u, device = std::make_unique<Device>(engine.device())](auto& stream, auto g) {
        device->launch(stream, std::int64_t{1}, Change{}, g.data(), static_cast<std::int64_t>(g.size()), u);
      });
    }
    fsdp::Sgd sgd(engine, {.momentum = 0.5f});
    for (int step = 0; step < 3; ++step) {
      {
        auto const evaluation = engine.evaluation();
        network.forward(1000 + step);
      }
      for (int micro = 0; micro < of.count(); ++micro) {
        bool const last = micro + 1 == of.count();
        auto const waits = engine.no_sync(of.micro_steps == MicroSteps::last_reduces && !last);
        auto const partly = engine.no_replica_sync(of.micro_steps == MicroSteps::last_replicates && !last);
        auto const before = seen;
        network.step(step * of.count() + micro);
        engine.synchronize();
        engine.mean_over_ranks({});  // no peer reads this rank's gradients any more
        for (std::size_t u = 0; u < shards.size(); ++u) {
          bool const reduced = reduces(of, shards[u], micro);
          int const calls = by != By::hand && of.is_hooked(u) && reduced ? 1 : 0;
          if (seen[u].calls - before[u].calls != calls)
            wrong(fmt::format("unit {}, micro-step {}: {} calls, expected {}", u, micro,
                              seen[u].calls - before[u].calls, calls));
          if (by != By::hand || !of.is_hooked(u) || !reduced) continue;
          for (std::int64_t i = 0; i < shards[u].shard_numel(); ++i)
            shards[u].gradient[i] = changed(u, shards[u].gradient[i]);
        }
      }
      look(engine, seen);
      sgd.step(0.5f);
    }
    if (auto const problem = check_program(engine.program(), engine.plan_input()); !problem.empty())
      wrong(problem + "\n" + to_text(engine.program()));
    if (engine.shards().late_events() != 0) wrong("an event is late");
    auto parameters = toy::parameters(engine);
    if (first) result = std::move(parameters);
  });
  return result;
}
template <class P>
std::vector<float> train(Case const& of, By by) {
  return train<P>(of, by, [](auto&, auto const&) {});
}

using fsdp::testing::strategies_and_groups;

/// Calls `act(case, precision)` for cases of all strategies, precisions and micro-steps. What else engines differ in
/// changes from case to case.
/// @param all  without it, and under a sanitizer, a case has one of the precisions, each strategy all of them
template <class Act>
void for_cases(int ranks, unsigned count, bool all, Act const& act) {
  auto const next = [&](unsigned choices) {
    count = count * 1103515245u + 12345u;
    return static_cast<int>(count / 65536u % choices);
  };
  auto const with = [&](auto precision, fsdp::ShardingStrategy const& strategy, MicroSteps micro_steps) {
    using P = decltype(precision);
    Case of{ranks, strategy, micro_steps};
    of.options.prefetch = next(3);
    of.options.allow_no_sync = micro_steps >= MicroSteps::last_reduces;
    of.options.allow_no_replica_sync = micro_steps == MicroSteps::last_replicates && strategy.grouped;
    if (next(2) == 0) of.options.bucket_bytes = 3000, of.options.first_bucket_bytes = 700;
    if (std::is_same_v<typename P::Reduce, float> && next(2) == 0) of.options.reduce_dtype = fsdp::DType::bf16;
    of.shape.setting = std::array{toy::Setting::none, toy::Setting::every,
                                  toy::Setting::even_layers}[static_cast<std::size_t>(next(3))];
    if (next(3) == 0) of.shape.root = fsdp::NoShard{};
    of.every_unit = next(3) > 0;
    INFO(fmt::format("{} ranks, {} of {}, micro-steps {}, prefetch {}, buckets {}, wire {}, setting {}, root {}, {}",
                     ranks, strategy.name, strategy.group, static_cast<int>(micro_steps), of.options.prefetch,
                     of.options.bucket_bytes, of.options.reduce_dtype.has_value(), static_cast<int>(of.shape.setting),
                     of.shape.root.has_value(), of.every_unit));
    act(of, precision);
  };
  int cases = 0;
  for (auto const& strategy : strategies_and_groups(ranks)) {
    for (auto const micro_steps :
         {MicroSteps::one, MicroSteps::all_reduce, MicroSteps::last_reduces, MicroSteps::last_replicates}) {
      int const only = all ? -1 : cases++ % 3;
      if (only < 0 || only == 0) with(fsdp::Fp32{}, strategy, micro_steps);
      if (only < 0 || only == 1) with(fsdp::Bf16{}, strategy, micro_steps);
      if (only < 0 || only == 2) with(fsdp::Bf16Reduce{}, strategy, micro_steps);
    }
  }
}

void compare_with_hand(int ranks, unsigned seed, bool all) {
  for_cases(ranks, seed, all, [](Case const& of, auto precision) {
    using P = decltype(precision);
    auto const hooked = train<P>(of, By::hooks);
    CHECK(hooked == train<P>(of, By::hand));
    if (std::is_same_v<P, fsdp::Fp32>) CHECK(hooked != train<P>(of, By::nobody));  // the hooks do something
  });
}

/// The full gradients of an engine, from shards, by unit. Ranks are threads.
class Whole {
 public:
  template <class E>
  void put(E& engine, std::vector<Seen> const& seen) {
    std::lock_guard const lock(mutex_);
    units_.resize(seen.size());
    for (std::size_t u = 0; u < seen.size(); ++u) {
      auto const& unit = engine.shards()[u];
      units_[u].resize(static_cast<std::size_t>(unit.full_numel()));
      if (seen[u].gradients.empty()) continue;
      auto const own = std::span(units_[u]).subspan(static_cast<std::size_t>(unit.shard().begin));
      std::copy(seen[u].gradients.begin(), seen[u].gradients.end(), own.begin());
    }
  }
  template <class E>
  std::vector<float> tensor(E& engine, std::string const& name) const {
    for (std::size_t u = 0; u < units_.size(); ++u)
      for (auto const& tensor : engine.shards()[u].layout().tensors())
        if (tensor.name == name)
          return {units_[u].begin() + tensor.range().begin, units_[u].begin() + tensor.range().end};
    return {};
  }

 private:
  std::mutex mutex_;
  std::vector<std::vector<float>> units_;
};

/// Calls of the hooks of a rank; all are enqueued on one stream.
struct Notes {
  std::vector<std::string> calls;
  std::vector<std::string> streams;  ///< names of the threads that ran what was enqueued
};
/// Adds a hook of this name.
template <class E>
void note(E& engine, std::size_t unit, std::string const& name, Notes& notes) {
  engine.shards().on_reduced(engine.shards()[unit], [&notes, name](Stream& stream, std::span<float>) {
    notes.calls.push_back(name);
    stream.enqueue([&notes, name] {
      std::array<char, 16> thread{};
      ::pthread_getname_np(::pthread_self(), thread.data(), thread.size());
      notes.streams.push_back(name + " on " + thread.data());
    });
  });
}

/// Calls in a step of two layers, threads of the tasks, and hooks of the program.
template <class P>
std::string streams_of(int ranks, fsdp::ShardingStrategy const& strategy, fsdp::EngineOptions const& options = {}) {
  std::string text;
  fsdp::local::run(ranks, Device{}, [&](Comm comm) {
    bool const first = comm.rank() == 0;
    fsdp::Mesh mesh(std::move(comm));
    fsdp::Engine<Comm, P> engine(mesh, strategy, options);
    auto layers = engine.shard(std::vector<Ramp<>>(2, Ramp<>{400}), "h");
    Notes notes;
    for (std::size_t u = 0; u < 2; ++u) note(engine, u, engine.shards()[u].name(), notes);
    for (auto& layer : layers) layer.forward();
    for (auto i = layers.size(); i-- > 0;) layers[i].backward(1.0f);
    engine.synchronize();
    auto const& program = engine.program();
    std::set<std::string> planned;
    for (auto const& turn : program.turns(fsdp::PassKind::backward))
      for (auto const& operation : turn.after)
        if (operation.primitive == fsdp::step::Primitive::hook)
          planned.insert(program.units[operation.unit].name + " on " + std::string(name(operation.stream)));
    if (!std::ranges::equal(planned, std::set<std::string>(notes.streams.begin(), notes.streams.end())))
      wrong("the program says otherwise");
    if (first) text = fmt::format("{}; {}", fsdp::listed(notes.calls), fsdp::listed(notes.streams));
  });
  return text;
}

using Layers = std::vector<fsdp::ShardedModule<Ramp<>, Engine>>;
void pass(Layers& layers) {
  for (auto& layer : layers) layer.forward();
  for (auto i = layers.size(); i-- > 0;) layers[i].backward(1.0f);
}

}  // namespace

TEST_CASE("hooks: what they change is what a run changes between backward and step") {
  int const ranks = GENERATE(1, 2, 3, 4);
  compare_with_hand(ranks, static_cast<unsigned>(ranks), false);
}

TEST_CASE("hooks: what they change is what a run changes between backward and step, in many more runs", "[.][hooks]") {
  int const ranks = GENERATE(1, 2, 3, 4);
  unsigned const seed = GENERATE(range(10u, 40u));
  compare_with_hand(ranks, seed, true);
}

namespace {

void compare_with_export(int ranks, bool all) {
  for_cases(ranks, 7, all, [](Case of, auto precision) {
    using P = decltype(precision);
    of.every_unit = true;
    Whole whole;
    std::size_t compared = 0;
    train<P>(of, By::nobody, [&](auto& engine, std::vector<Seen> const& seen) {
      whole.put(engine, seen);
      engine.mean_over_ranks({});  // all ranks have
      fsdp::export_gradients(engine, [&](fsdp::TensorInfo const& info, std::span<float const> values) {
        auto const found = whole.tensor(engine, info.name);
        if (!std::ranges::equal(found, values)) wrong("a hook of tensor '" + info.name + "' sees other gradients");
        ++compared;
      });
      engine.mean_over_ranks({});
    });
    CHECK(compared == 3 * 14);
  });
}

}  // namespace

TEST_CASE("hooks: they see the gradients that are exported, bit for bit") {
  compare_with_export(GENERATE(1, 2, 3, 4), false);
}

TEST_CASE("hooks: they see the gradients that are exported with every precision", "[.][hooks]") {
  compare_with_export(GENERATE(1, 2, 3, 4), true);
}

TEST_CASE("hooks: they are called behind the operation that completes the shard, on its stream") {
  using Fp32 = fsdp::Fp32;
  using Reduce = fsdp::Bf16Reduce;
  auto const on = [](std::string const& stream) { return "h.1, h.0; h.1 on " + stream + ", h.0 on " + stream; };
  CHECK(streams_of<Fp32>(1, fsdp::FullShard{}) == on("compute"));
  CHECK(streams_of<Reduce>(1, fsdp::FullShard{}) == on("reduce"));
  CHECK(streams_of<Fp32>(2, fsdp::FullShard{}) == on("reduce"));
  CHECK(streams_of<Fp32>(2, fsdp::ShardGradOp{}) == on("reduce"));
  CHECK(streams_of<Fp32>(2, fsdp::NoShard{}) == on("replicate"));
  CHECK(streams_of<Reduce>(2, fsdp::NoShard{}) == on("replicate"));
  CHECK(streams_of<Fp32>(2, fsdp::NoShard{}, {.reduce_dtype = fsdp::DType::bf16}) == on("replicate"));
  CHECK(streams_of<Fp32>(4, fsdp::HybridShard<>{2}) == on("replicate"));
  CHECK(streams_of<Fp32>(4, fsdp::HybridShard<>{2}, {.allow_no_replica_sync = true}) == on("replicate"));
}

TEST_CASE("hooks: several of one unit are called in the order of registration, and calls are those of each reduction") {
  int const ranks = GENERATE(1, 3);
  fsdp::local::run(ranks, Device{}, [&](Comm comm) {
    fsdp::Mesh mesh(std::move(comm));
    Engine engine(mesh, fsdp::FullShard{}, {.allow_no_sync = true, .allow_frozen_parameters = true});
    auto layers = engine.shard(std::vector<Ramp<>>(3), "h");
    Notes notes;
    for (auto const* name : {"a", "b", "c"}) note(engine, 1, name, notes);
    note(engine, 0, "d", notes);
    fsdp::Sgd sgd(engine);
    auto const calls = [&] { return fsdp::listed(std::exchange(notes.calls, {})); };
    std::vector<std::string> found;
    auto const look = [&] { found.push_back(calls()); };
    pass(layers), look();
    {
      auto const waits = engine.no_sync();
      pass(layers), look();
    }
    {
      auto const waits = engine.no_replica_sync();  // there are no replicas
      pass(layers), look();
    }
    {
      auto const frozen = engine.frozen_parameters();
      pass(layers), look();
    }
    {
      auto const evaluation = engine.evaluation();
      for (auto& layer : layers) layer.forward();
      look();
    }
    pass(layers), look();
    engine.discard_gradients(), look();
    pass(layers), look();
    sgd.step(clip_grad_norm(engine, 1.0f)), look();
    std::string const all = "a, b, c, d";
    if (found != std::vector<std::string>{all, "", all, "", "", all, "", all, ""}) wrong(fsdp::listed(found));
  });
}

TEST_CASE("hooks: the function of a unit in several buckets is called behind the last of them") {
  std::string text;
  fsdp::local::run(2, Device{}, [&](Comm comm) {
    bool const first = comm.rank() == 0;
    fsdp::Mesh mesh(std::move(comm));
    Engine engine(mesh, fsdp::NoShard{}, {.bucket_bytes = 2048, .first_bucket_bytes = 1024});
    auto layers = engine.shard(std::vector{Ramp<>{100}, Ramp<>{600}, Ramp<>{100}}, "h");
    Notes notes;
    for (std::size_t u = 0; u < 3; ++u) note(engine, u, engine.shards()[u].name(), notes);
    engine.seal();
    if (first) text = to_text(engine.program(), fsdp::plain_step);
    pass(layers);
    engine.synchronize();
    if (notes.calls.size() != 3) wrong(fsdp::listed(notes.calls));
  });
  CHECK(has(text, "all-reduce h.1 bucket 0, hook h.2, all-reduce h.1 bucket 1, hook h.1\n"));
  CHECK(has(text, "all-reduce h.0 bucket 2, hook h.0\n"));
}

TEST_CASE("hooks: a trace has their spans") {
  fsdp::local::run(2, Device{}, [&](Comm comm) {
    fsdp::Mesh mesh(std::move(comm));
    Engine engine(mesh, fsdp::FullShard{});
    auto layers = engine.shard(std::vector<Ramp<>>(2), "h");
    engine.shards().on_reduced(fsdp::UnitId{1}, [](Stream&, std::span<float>) {});
    engine.start_trace(100);
    pass(layers);
    std::vector<std::string> spans;
    for (auto const& span : engine.stop_trace())
      if (span.what == "hook")
        spans.push_back(fmt::format("{} {} {} {}", span.unit, span.pass, fsdp::name(span.kind), span.bytes));
    auto const bytes = 4 * engine.shards()[1].shard_numel();
    if (spans != std::vector{fmt::format("h.1 backward reduce {}", bytes)}) wrong(fsdp::listed(spans));
  });
}

TEST_CASE("hooks: an exception of one interrupts the pass on all ranks that throw, and leaves nothing once discarded") {
  int const ranks = GENERATE(1, 2, 4);
  auto const strategy = GENERATE(fsdp::ShardingStrategy(fsdp::FullShard{}), fsdp::ShardingStrategy(fsdp::NoShard{}));
  auto const weights_of = [&](bool breaks) {
    std::vector<float> weights;
    fsdp::local::run(ranks, Device{}, [&](Comm comm) {
      bool const first = comm.rank() == 0;
      fsdp::Mesh mesh(std::move(comm));
      Engine engine(mesh, strategy);
      auto layers = engine.shard(std::vector<Ramp<>>(3), "h");
      bool broken = false;
      for (std::size_t u = 0; u < 3; ++u)
        engine.shards().on_reduced(engine.shards()[u], [u, &broken, &engine](Stream& stream, std::span<float> g) {
          engine.device().launch(stream, std::int64_t{1}, Change{}, g.data(), static_cast<std::int64_t>(g.size()), u);
          if (broken && u == 1) throw std::domain_error("boom");
        });
      fsdp::Sgd sgd(engine);
      for (int step = 0; step < 3; ++step) {
        for (broken = breaks && step > 0; broken;) {
          std::string thrown;
          try {
            pass(layers);
          } catch (std::domain_error const& error) {
            thrown = error.what();
          }
          if (thrown != "boom") wrong("thrown: " + thrown);
          for (auto const& call : std::vector<std::function<void()>>{[&] { layers[0].backward(1.0f); },
                                                                     [&] { layers[0].forward(); }, [&] { sgd.step(); }})
            if (!has(refusal(call), "an exception has interrupted a backward pass")) wrong(refusal(call));
          engine.discard_gradients();
          broken = false;
        }
        pass(layers);
        sgd.step(0.5f);
      }
      auto parameters = toy::parameters(engine);
      if (first) weights = std::move(parameters);
    });
    return weights;
  };
  CHECK(weights_of(true) == weights_of(false));
}

TEST_CASE("hooks: an exception of one on one rank reaches its caller, and names the rank to the others") {
  std::vector<std::string> errors(3);
  auto const run = [&] {
    fsdp::local::run(3, Device{}, [&](Comm comm) {
      auto const rank = static_cast<std::size_t>(comm.rank());
      fsdp::Mesh mesh(std::move(comm));
      Engine engine(mesh, fsdp::FullShard{});
      auto layers = engine.shard(std::vector<Ramp<>>(2), "h");
      engine.shards().on_reduced(fsdp::UnitId{1}, [rank](Stream&, std::span<float>) {
        if (rank == 1) throw std::domain_error("boom");
      });
      try {
        pass(layers);
        engine.synchronize();
        engine.mean_over_ranks({1.0});
      } catch (std::exception const& error) {
        errors[rank] = error.what();
        throw;
      }
    });
  };
  CHECK_THROWS_AS(run(), std::domain_error);
  CHECK(errors[1] == "boom");
  CHECK(has(errors[0], "rank 1"));
  CHECK(has(errors[2], "rank 1"));
}

TEST_CASE("hooks: calls that begin something else are refused inside one, and the pass goes on") {
  int const ranks = GENERATE(1, 2);
  auto const weights_of = [&](bool calls) {
    std::vector<float> weights;
    fsdp::local::run(ranks, Device{}, [&](Comm comm) {
      bool const first = comm.rank() == 0;
      fsdp::Mesh mesh(std::move(comm));
      Engine engine(mesh, fsdp::FullShard{}, {.allow_no_sync = true});
      auto layers = engine.shard(std::vector<Ramp<>>(2), "h");
      std::optional<fsdp::Sgd<Engine>> sgd;
      int refused = 0;
      auto const shards = engine.shards();
      for (std::size_t u = 0; u < 2; ++u)
        shards.on_reduced(shards[u], [&](Stream&, std::span<float>) {
          if (!calls) return;
          std::vector<std::function<void()>> const forbidden{
              [&] { layers[0].forward(); },
              [&] { layers[0].backward(1.0f); },
              [&] { layers[1].backward(1.0f); },
              [&] { static_cast<void>(engine.evaluation()); },
              [&] { engine.discard_gradients(); },
              [&] { sgd->step(); },
              [&] { static_cast<void>(clip_grad_norm(engine, 1.0f)); },
              [&] { fsdp::export_gradients(engine, [](auto const&, auto) {}); },
              [&] { shards.abandon_pass("a test"); },
              [&] { shards.on_reduced(shards[0], [](Stream&, std::span<float>) {}); },
          };
          for (auto const& call : forbidden) refused += what(call) == "nothing was thrown" ? 0 : 1;
          engine.synchronize();
        });
      sgd.emplace(engine);
      for (int step = 0; step < 2; ++step) {
        pass(layers);
        if (refused != (calls ? 20 * (step + 1) : 0)) wrong(fmt::format("{} calls were refused", refused));
        sgd->step(0.5f);
      }
      auto parameters = toy::parameters(engine);
      if (first) weights = std::move(parameters);
    });
    return weights;
  };
  CHECK(weights_of(true) == weights_of(false));
}

TEST_CASE("hooks: wrong registrations are refused by name, and change nothing") {
  fsdp::local::run(1, Device{}, [](Comm comm) {
    fsdp::Mesh mesh(std::move(comm));
    auto const hook = [](Stream&, std::span<float>) {};
    Engine engine(mesh, fsdp::FullShard{}), other(mesh, fsdp::FullShard{});
    auto const unit = engine.add_unit("tied"), frozen = engine.add_unit("base", {.frozen = true}),
               foreign = other.add_unit("other");
    auto layer = engine.shard(Ramp<>{}, "tied", unit);
    auto base = engine.shard(Ramp<>{}, "base", frozen);
    auto const shards = engine.shards();
    CHECK(refusal([&] { shards.on_reduced(frozen, hook); }) ==
          "rank 0: on_reduced: unit 'base' is frozen: it has no gradients");
    CHECK(refusal([&] { shards.on_reduced(shards[1], hook); }) ==
          "rank 0: on_reduced: unit 'base' is frozen: it has no gradients");
    CHECK(refusal([&] { shards.on_reduced(foreign, hook); }) ==
          "rank 0: the unit given to on_reduced belongs to another engine; pass an id that this engine has returned");
    CHECK(refusal([&] { shards.on_reduced(other.shards()[0], hook); }) ==
          "rank 0: unit 'other' belongs to another engine; pass a unit of this engine");
    CHECK(refusal([&] { shards.on_reduced(fsdp::UnitId{2}, hook); }) ==
          "rank 0: on_reduced: there is no unit 2; the engine has 2, counted from 0");
    engine.seal();
    CHECK(
        refusal([&] { shards.on_reduced(unit, hook); }) ==
        "rank 0: on_reduced was called for unit 'tied' too late; call it before the first forward, optimizer, save or "
        "load, which seals the engine");
    CHECK(!has(to_text(engine.program()), "hook"));
  });
}

TEST_CASE("hooks: a unit that turns out to be frozen, or without parameters, is refused when the engine is sealed") {
  bool const is_frozen = GENERATE(true, false);
  fsdp::local::run(1, Device{}, [&](Comm comm) {
    fsdp::Mesh mesh(std::move(comm));
    Engine engine(mesh, fsdp::FullShard{});
    auto layer = engine.shard(Ramp<>{}, "layer");
    auto last = engine.shard(Ramp<>{is_frozen ? 5 : 0}, "last");
    engine.shards().on_reduced(engine.shards()[1], [](Stream&, std::span<float>) {});
    engine.shards()[1].frozen = is_frozen;
    CHECK(refusal([&] { engine.seal(); }) == "rank 0: on_reduced was called for the frozen or empty unit 'last'");
  });
}

TEST_CASE("hooks: ranks that register other numbers of them are told the unit, each of them") {
  int const more = GENERATE(0, 1);
  std::vector<std::string> errors(3);
  fsdp::local::run(3, Device{}, [&](Comm comm) {
    auto const rank = static_cast<std::size_t>(comm.rank());
    fsdp::Mesh mesh(std::move(comm));
    Engine engine(mesh, fsdp::FullShard{});
    auto layers = engine.shard(std::vector<Ramp<>>(2), "h");
    for (int i = 0; i < more + (rank == 2 ? 1 : 0); ++i)
      engine.shards().on_reduced(engine.shards()[1], [](Stream&, std::span<float>) {});
    try {
      engine.seal();
    } catch (fsdp::ConfigError const& error) {
      errors[rank] = error.what();
    }
  });
  std::string const with = "with on_reduced, ",
                    unit = "unit 'h.1' is full_shard, which shards and reshards after forward";
  for (std::size_t rank = 0; rank < 3; ++rank)
    CHECK(errors[rank] ==
          fmt::format(
              "rank {}: ranks disagree: rank 0 has \"{}{}\", rank 2 has \"{}{}{}\"; expected the same on all ranks",
              rank, more ? with : "", unit, with, more ? with : "", unit));
}
