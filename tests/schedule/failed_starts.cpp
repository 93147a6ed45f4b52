// SPDX-License-Identifier: Apache-2.0
// A start that fails and is tried again. Calls that declare something, and sealing, are repeated: in each attempt a
// later allocation fails, or a later call of the caller's functions, until none is left. A failed attempt leaves the
// engine as it was, and at last it trains as one whose start has never failed.
// skip-tsan
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "fsdp/ema.hpp"
#include "fsdp/fsdp.hpp"
#include "fsdp/gradients.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"
#include "fsdp/offload.hpp"
#include "fsdp/paths.hpp"
#include "fsdp/plan.hpp"
#include "fsdp/scopes.hpp"
#include "tests/catch.hpp"
#include "tests/support/allocations.hpp"
#include "tests/support/messages.hpp"
#include "tests/support/rank_checks.hpp"
#include "tests/support/sanitized.hpp"

namespace failed_starts {
namespace {

using Comm = fsdp::local::Communicator<fsdp::host::Device>;
using fsdp::testing::allocations_until_failure;
using fsdp::testing::refusal;

/// The calling thread's calls of the caller's functions until one throws, once; negative: none does.
thread_local long calls_until_failure = -1;
void called() {
  if (calls_until_failure >= 0 && calls_until_failure-- == 0) throw std::domain_error("boom");
}

enum class Fails { nothing, allocations, calls };

/// A function of the caller that throws where it is moved, and where it is called.
template <class F>
struct Throwing {
  F f;
  explicit Throwing(F function) : f(std::move(function)) {}
  Throwing(Throwing&& other) : f(other.f) { called(); }
  template <class... Args>
  void operator()(Args&&... args) {
    called();
    f(std::forward<Args>(args)...);
  }
};

/// Tensors of three kinds; backward adds i % 7 + 1 to the gradient of element i. It is moved by a copy that throws.
struct Part {
  std::int64_t elements = 70;
  bool kinds = true;

  explicit Part(std::int64_t n = 70, bool of_kinds = true) : elements(n), kinds(of_kinds) {}
  Part(Part const& other) : elements(other.elements), kinds(other.kinds) { called(); }
  Part& operator=(Part const&) = default;

  template <class T>
  struct Params {
    fsdp::Tensor<T, 1> w, still, alone;
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    called();
    tensor("w", p.w, {elements});
    if (kinds) {
      tensor("still", p.still, {elements + 1}, fsdp::frozen);
      called();
      tensor("alone", p.alone, {elements + 2}, fsdp::TensorOptions{.strategy = fsdp::NoShard{}});
    }
    called();
  }
  template <class P>
  void forward(fsdp::host::Stream&, Params<P> const&) const {}
  template <class P, class G>
  void backward(fsdp::host::Stream& stream, Params<P> const&, Params<G> const& gradient) const {
    stream.enqueue([gradient] {
      for (auto const& g : {gradient.w, gradient.alone})
        for (std::int64_t i = 0; g.data != nullptr && i < g.numel(); ++i) g.data[i] += static_cast<float>(i % 7 + 1);
    });
  }
  fsdp::plan::Work work() const {
    called();
    return {{1.0, 2.0}, {3.0, 4.0}};
  }
};

/// State of an engine that is not sealed: everything that a call could leave behind.
template <class E>
std::string state_of(E& engine) {
  auto text = engine.shards().core().declared.text();
  for (std::size_t tag = 0; tag < static_cast<std::size_t>(fsdp::MemoryTag::count_); ++tag)
    text += fsdp::formatted("{} {} ", engine.account().reserved(static_cast<fsdp::MemoryTag>(tag)),
                            engine.account().live(static_cast<fsdp::MemoryTag>(tag)));
  return text + (engine.sealed() ? "sealed" : "not sealed");
}

/// Makes a call until it returns; each attempt fails one allocation, or one call of the caller's functions, later.
/// @param state   called after each attempt that has failed: it must be as before
/// @param stride  1: each of them fails in turn
/// @return the attempts
template <class Act, class State>
long attempt(Fails fails, Act const& act, State const& state, long stride = 1) {
  if (fails == Fails::nothing) return act(), 1;
  auto& left = fails == Fails::calls ? calls_until_failure : allocations_until_failure;
  auto const before = state();
  long attempts = 0;
  for (long at = 0;; at += stride) {
    ++attempts;
    bool threw = true;
    left = at;
    try {
      act();
      threw = false;
    } catch (std::bad_alloc const&) {
      RANK_CHECK(fails == Fails::allocations);
    } catch (fsdp::ResourceError const&) {  // no memory of the device
      RANK_CHECK(fails == Fails::allocations);
    } catch (std::domain_error const&) {
      RANK_CHECK(fails == Fails::calls);
    } catch (fsdp::PeerError const&) {  // another rank has failed
    }
    bool const failed = left < 0;
    left = -1;
    if (!threw) {
      RANK_CHECK(!failed);  // nothing swallows an exception
      return attempts;
    }
    auto const after = state();
    RANK_CHECK(after == before);
    if (after != before)
      throw std::logic_error(fsdp::formatted("attempt {} has left\n{}\ninstead of\n{}", at, after, before));
  }
}

struct Outcome {
  std::vector<float> weights;
  std::string program;
  std::vector<std::int64_t> bytes;
  long attempts = 0;

  /// Results that must not depend on failures.
  auto rest() const { return std::tie(weights, program, bytes); }
};

struct Run {
  int ranks = 1;
  fsdp::ShardingStrategy strategy = fsdp::FullShard{};
  bool offloads = false;
  int failing_rank = -1;  ///< all
};

/// @return what rank 0 has after two steps
Outcome started(Run const& run, Fails all_fail) {
  Outcome outcome;
  fsdp::local::run(run.ranks, fsdp::host::Device{}, [&](Comm comm) {
    using Engine = fsdp::Engine<Comm, fsdp::Bf16>;
    using Sharded = fsdp::ShardedModule<Part, Engine>;
    auto const fails = run.failing_rank < 0 || run.failing_rank == comm.rank() ? all_fail : Fails::nothing;
    fsdp::Mesh mesh(std::move(comm));
    Engine engine(mesh, run.strategy, {.trap_stale_pointers = true});
    fsdp::UnitId root, unit;
    fsdp::UseId held;
    std::vector<fsdp::TensorId> places;
    std::unique_ptr<Sharded> first, last;
    std::vector<Sharded> layers;
    fsdp::PathId path;
    int reduced = 0;
    auto const shards = engine.shards();
    std::vector<std::function<void()>> const calls{
        [&] { root = engine.add_unit("root", {.strategy = fsdp::NoShard{}}); },
        [&] { first.reset(new Sharded(engine.shard(Part{}, "ends", root))); },
        [&] { layers = engine.shard(std::vector<Part>(3), "layers"); },
        [&] {
          std::vector<fsdp::DeclaredTensor> tensors{{"held.w", {5}}, {"held.b", {6}, fsdp::frozen}};
          held = engine.declare_use(fsdp::UnitOptions{}, "held", std::move(tensors), places, unit);
        },
        [&] { last.reset(new Sharded(engine.shard(Part{}, "ends", root))); },
        [&] {
          for (std::size_t u = 0; u < shards.size(); ++u)
            shards.set_initial_values(shards[u], Throwing([](auto&&, std::int64_t at, std::span<float> out) {
                                        for (auto& value : out) value = 0.5f * static_cast<float>(at++);
                                      }));
        },
        [&] { shards.on_reduced(root, Throwing([&](auto&&...) { ++reduced; })); },
        [&] {
          engine.set_forward_prefetch(*first, {layers[1], layers[0]});
        },
        [&] { engine.set_backward_prefetch(*last, {layers[2]}); },
        [&] { engine.recompute_segment(layers[0], layers[1]); },
        [&] {
          path = engine.add_path("short", {*first, layers[0], layers[1], *last});
        },
        [&] {
          path = engine.add_path("shorter", {layers[2], *last});
        },
        [&] {
          if (run.offloads) fsdp::offload(engine, {.moments = true, .masters = true, .gradients = true});
        },
    };
    auto const state = [&] { return state_of(engine); };
    long attempts = 0;
    for (auto const& call : calls) attempts += attempt(fails, call, state);
    if (run.failing_rank >= 0 && fails == Fails::nothing) {  // until the rank that fails has sealed
      while (!engine.sealed()) {
        auto const before = state();
        try {
          engine.seal();
        } catch (fsdp::PeerError const& error) {
          if (!fsdp::testing::has(error.what(), "the engine was not sealed on any rank: rank 1: boom")) throw;
          RANK_CHECK(state() == before);
        }
        ++attempts;
      }
    } else {
      // Sealing compiles the program each time, and allocates thousands of times.
      long const stride = fails != Fails::allocations ? 1 : fsdp::testing::sanitized ? 97 : 7;
      attempts += attempt(
          fails, [&] { engine.seal(); }, state, stride);
    }

    fsdp::HeldUse use{engine};
    auto const hold = [&](fsdp::Pass pass) { use.begin(pass, held), use.end(); };
    std::optional<fsdp::Sgd<Engine>> sgd;
    std::optional<fsdp::Ema<Engine>> ema;
    std::optional<fsdp::GradScaler<Engine>> scaler;
    std::vector<std::function<void()>> const more{
        [&] { sgd.emplace(engine, fsdp::SgdOptions{.lr = 0.5f, .momentum = 0.5f}); },
        [&] { ema.emplace(engine); },
        [&] { scaler.emplace(engine); },
    };
    for (auto const& call : more) attempts += attempt(fails, call, state);
    scaler.reset();
    for (int step = 0; step < 2; ++step) {
      first->forward();
      for (auto& layer : layers) layer.forward();
      hold(fsdp::Pass::forward);
      last->forward();
      last->backward();
      hold(fsdp::Pass::backward);
      layers[2].backward();
      for (auto const i : {0u, 1u}) layers[i].recompute();
      for (auto const i : {1u, 0u}) layers[i].backward();
      first->backward();
      sgd->step();
    }
    RANK_CHECK(reduced == 2);
    std::vector<float> weights;
    fsdp::export_full(engine, [&](fsdp::TensorInfo const&, std::span<float const> values) {
      weights.insert(weights.end(), values.begin(), values.end());
    });
    if (engine.rank() != 0) return;
    outcome = {std::move(weights), fsdp::to_text(engine.program()), {}, attempts};
    for (std::size_t tag = 0; tag < static_cast<std::size_t>(fsdp::MemoryTag::count_); ++tag) {
      outcome.bytes.push_back(engine.account().reserved(static_cast<fsdp::MemoryTag>(tag)));
      outcome.bytes.push_back(engine.account().live(static_cast<fsdp::MemoryTag>(tag)));
    }
  });
  return outcome;
}

struct Nothing {
  template <class T>
  struct Params {
    fsdp::Tensor<T, 1> w;
  };
};
/// Calls its engine, or its plan, while it is described.
struct Calling : Nothing {
  std::function<void()> call;
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor("w", p.w, {8});
    call();
  }
};

}  // namespace

TEST_CASE("declarations and sealing in which an allocation fails change nothing, and go on") {
  Run const run{.offloads = true};
  auto const expected = started(run, Fails::nothing), outcome = started(run, Fails::allocations);
  CHECK(outcome.attempts > expected.attempts + (fsdp::testing::sanitized ? 150 : 400));
  CHECK(outcome.rest() == expected.rest());
  CHECK_RANKS();
}

TEST_CASE("declarations and sealing in which a function of the caller throws on all ranks change nothing, and go on") {
  for (int const ranks : {1, 2, 3}) {
    if (fsdp::testing::sanitized && ranks != 2) continue;
    Run const run{.ranks = ranks, .offloads = ranks == 2};
    auto const expected = started(run, Fails::nothing), outcome = started(run, Fails::calls);
    CHECK(outcome.attempts > expected.attempts + 40);
    CHECK(outcome.rest() == expected.rest());
    CHECK_RANKS();
  }
}

TEST_CASE("where functions of one rank alone throw in sealing, no rank seals, and all go on") {
  Run const run{.ranks = 3, .failing_rank = 1};
  auto const expected = started(run, Fails::nothing), outcome = started(run, Fails::calls);
  CHECK(outcome.attempts > expected.attempts + 2);
  CHECK(outcome.rest() == expected.rest());
  CHECK_RANKS();
}

TEST_CASE("an engine whose sealing has failed takes further modules") {
  std::array<std::vector<float>, 2> weights;
  std::array<std::string, 2> programs;
  for (int const failed : {0, 1}) {
    fsdp::local::run(2, fsdp::host::Device{}, [&](Comm comm) {
      using Engine = fsdp::Engine<Comm, fsdp::Bf16>;
      fsdp::Mesh mesh(std::move(comm));
      Engine engine(mesh, fsdp::FullShard{});
      std::vector<fsdp::ShardedModule<Part, Engine>> modules;
      auto const root = engine.add_unit("root");
      modules.push_back(engine.shard(Part{}, "ends", root));
      modules.push_back(engine.shard(Part{700}, "a"));
      auto const shards = engine.shards();
      bool fails = failed == 1;
      shards.set_initial_values(shards[root], [&](auto&&, std::int64_t, std::span<float> out) {
        if (std::exchange(fails, false)) throw std::domain_error("boom");
        for (auto& value : out) value = 2.0f;
      });
      if (failed == 1) {
        try {
          engine.seal();
          RANK_CHECK(false);
        } catch (std::domain_error const&) {
        }
      }
      modules.push_back(engine.shard(Part{300, false}, "more", root));
      modules.push_back(engine.shard(Part{1000}, "b"));
      modules.push_back(engine.shard(Part{}, "ends", root));
      fsdp::offload(engine, {.masters = true});
      fsdp::Sgd sgd{engine, {.lr = 0.5f}};
      for (int step = 0; step < 3; ++step) {
        for (auto& module : modules) module.forward();
        for (auto i = modules.size(); i-- > 0;) modules[i].backward();
        sgd.step();
      }
      std::vector<float> all;
      fsdp::export_full(engine, [&](fsdp::TensorInfo const&, std::span<float const> values) {
        all.insert(all.end(), values.begin(), values.end());
      });
      if (engine.rank() != 0) return;
      weights[static_cast<std::size_t>(failed)] = std::move(all);
      programs[static_cast<std::size_t>(failed)] = fsdp::to_text(engine.program());
    });
  }
  CHECK_RANKS();
  REQUIRE(weights[0].size() > 2000);
  CHECK(weights[0] == weights[1]);
  CHECK(programs[0] == programs[1]);
}

TEST_CASE("plans: a module that cannot be added leaves nothing") {
  auto const declared = [](Fails fails) {
    fsdp::plan::Declaration<fsdp::Bf16> plan(2, fsdp::FullShard{});
    fsdp::UnitId root;
    std::vector<std::function<void()>> const calls{
        [&] { root = plan.add_unit("root"); },
        [&] { plan.shard(Part{}, "ends", root); },
        [&] { plan.shard(std::vector<Part>(3), "layers"); },
        [&] { plan.shard(Part{}, "ends", root); },
    };
    auto const state = [&] { return fsdp::formatted("{} {}", plan.input().units.size(), plan.work().size()); };
    for (auto const& call : calls) attempt(fails, call, state);
    return std::pair(fsdp::to_text(fsdp::compile_program(plan.input())), plan.work().size());
  };
  auto const expected = declared(Fails::nothing);
  CHECK(expected.second == 5);
  CHECK(declared(Fails::calls) == expected);
  CHECK(declared(Fails::allocations) == expected);
  CHECK_RANKS();
}

TEST_CASE("a module that calls its engine while it is added is refused, and is not there") {
  fsdp::local::run(1, fsdp::host::Device{}, [](Comm comm) {
    using Engine = fsdp::Engine<Comm>;
    fsdp::Mesh mesh(std::move(comm));
    Engine engine(mesh, fsdp::FullShard{});
    auto const root = engine.add_unit("root");
    auto a = engine.shard(Part{8}, "a"), b = engine.shard(Part{8}, "b", root);
    auto const shards = engine.shards();
    auto const before = state_of(engine);
    std::vector<std::function<void()>> const calls{
        [&] { engine.shard(Part{}, "c"); },
        [&] { engine.shard(Part{}, "c", root); },
        [&] { engine.shard(std::vector<Part>(2), "c"); },
        [&] { engine.add_unit("c"); },
        [&] {
          std::vector<fsdp::TensorId> places;
          engine.declare_use(root, "c", {{"c.w", {5}}}, places);
        },
        [&] { engine.seal(); },
        [&] { a.forward(); },
        [&] { fsdp::Sgd{engine}.step(); },
        [&] { fsdp::export_full(engine, [](auto&&...) {}); },
        [&] { engine.set_forward_prefetch(a, {b}); },
        [&] { engine.recompute_segment(a, a); },
        [&] { engine.add_path("path", {a}); },
        [&] { fsdp::offload(engine, {.moments = true}); },
        [&] { shards.on_reduced(root, [](auto&&...) {}); },
        [&] { shards.set_initial_values(shards[root], [](auto&&...) {}); },
    };
    for (auto const& call : calls)
      for (bool const shares : {false, true}) {
        auto const text = refusal([&] {
          shares ? engine.shard(Calling{{}, call}, "m", root) : engine.shard(Calling{{}, call}, "m");
        });
        RANK_CHECK(fsdp::testing::has(text, "while a module is being added: describe()"));
        RANK_CHECK(state_of(engine) == before);
        // The module catches that, and throws something else.
        auto const caught = [&] {
          if (refusal(call).empty()) throw std::logic_error("it was not refused");
          throw std::domain_error("boom");
        };
        try {
          engine.shard(std::vector<Calling>{{{}, [] {}}, {{}, caught}}, "m");
          RANK_CHECK(false);
        } catch (std::domain_error const&) {
        }
        RANK_CHECK(state_of(engine) == before);
      }
    // Calls that declare nothing are allowed.
    auto c =
        engine.shard(Calling{{}, [&] { static_cast<void>(engine.plan_input()), engine.discard_gradients(); }}, "c");
    a.forward(), b.forward();
  });
  CHECK_RANKS();
}

TEST_CASE("a function that gives initial values must not add to its engine, nor seal it") {
  fsdp::local::run(2, fsdp::host::Device{}, [](Comm comm) {
    fsdp::Mesh mesh(std::move(comm));
    fsdp::Engine engine(mesh, fsdp::NoShard{});  // each rank calls the functions
    auto a = engine.shard(Part{8}, "a");
    auto const shards = engine.shards();
    auto const before = state_of(engine);
    std::vector<std::function<void()>> const calls{
        [&] { engine.shard(Part{}, "c"); },
        [&] { engine.seal(); },
        [&] { a.forward(); },
        [&] { shards.set_initial_values(shards[0], [](auto&&...) {}); },
    };
    for (auto const& call : calls) {
      shards.set_initial_values(shards[0], [&](auto&&...) { call(); });
      RANK_CHECK(fsdp::testing::has(refusal([&] { engine.seal(); }), "while the engine is being sealed: describe()"));
      RANK_CHECK(state_of(engine) == before);
    }
    shards.set_initial_values(shards[0], [&](auto&&, std::int64_t, std::span<float> out) {
      for (auto const& call : calls) RANK_CHECK(refusal(call) != "");
      for (auto& value : out) value = 7.0f;
    });
    a.forward();
    float seen = 7.0f;
    fsdp::export_full(engine, [&](fsdp::TensorInfo const& tensor, std::span<float const> values) {
      if (tensor.name == "a.w") seen = values[0];
    });
    RANK_CHECK(seen == 7.0f);
  });
  CHECK_RANKS();
}

}  // namespace failed_starts
