// SPDX-License-Identifier: Apache-2.0
// A module without parameters is a unit like others, and nothing moves for it: the step is that of the others alone.
// skip-sanitizers
#include <fmt/format.h>

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/full_state.hpp"
#include "tests/catch.hpp"
#include "tests/support/ramp.hpp"

namespace {

using fsdp::testing::Ramp;
using Comm = fsdp::local::Communicator<fsdp::host::Device>;

/// Counts its calls.
struct Relu {
  int* calls;
  template <class T>
  struct Params {};
  template <class T, class Visit>
  void describe(Params<T>&, Visit&&) const {}
  template <class P>
  void forward(fsdp::host::Stream&, Params<P const> const&) const {
    ++*calls;
  }
  template <class P, class G>
  void backward(fsdp::host::Stream&, Params<P const> const&, Params<G> const&) const {
    ++*calls;
  }
};

/// Without the numbers of units, which modules without parameters change.
std::string text(fsdp::Program const& program, fsdp::PassKind kind, fsdp::step::Operation const& operation) {
  auto words = fmt::format("{} {} {} {}", name(kind), name(operation.primitive), program.units[operation.unit].name,
                           static_cast<unsigned>(operation.when));
  for (auto const& [cells, mode] : operation.accesses())
    words += fmt::format(" {} {} {}", name(mode), name(cells.pool),
                         fsdp::step::Buffers::has_slots(cells.pool) ? cells.first : 0u);
  return words + '\n';
}

struct Outcome {
  std::vector<float> weights, gradients;
  double norm = 0;
  std::int64_t reserved = 0, live = 0;
  fsdp::MemoryPlan plan;
  std::string program;  ///< its operations
  int calls = 0;

  bool operator==(Outcome const& other) const {
    return weights == other.weights && gradients == other.gradients && norm == other.norm &&
           reserved == other.reserved && live == other.live && plan.reserved() == other.plan.reserved() &&
           plan.live_forward == other.plan.live_forward && plan.live_backward == other.plan.live_backward &&
           plan.live_accumulated == other.plan.live_accumulated && plan.live_most == other.plan.live_most &&
           program == other.program;
  }
};

/// Four layers. A Relu before, between and after them, if `relus`.
template <class P>
Outcome train(fsdp::ShardingStrategy const& strategy, fsdp::EngineOptions const& options, int ranks, bool relus) {
  Outcome outcome;
  fsdp::local::run(ranks, fsdp::host::Device{}, [&](Comm comm) {
    fsdp::Mesh mesh(std::move(comm));
    using Engine = fsdp::Engine<Comm, P>;
    Engine engine(mesh, strategy, options);
    std::vector<fsdp::ShardedModule<Ramp<>, Engine>> layers;
    std::vector<fsdp::ShardedModule<Relu, Engine>> between;
    int calls = 0;
    for (int i = 0; i <= 4; ++i) {
      if (relus) between.push_back(engine.shard(Relu{&calls}, "relu" + std::to_string(i)));
      if (i < 4) layers.push_back(engine.shard(Ramp<>{300 + 100 * i}, "layer" + std::to_string(i)));
    }
    fsdp::AdamW adamw(engine, {.lr = 0.5f});
    auto const forward = [&] {
      for (std::size_t i = 0; i <= 4; ++i) {
        if (relus) between[i].forward();
        if (i < 4) layers[i].forward();
      }
    };
    double norm_value = 0;
    for (int step = 0; step < 4; ++step) {
      if (step == 2) {
        auto const scope = engine.evaluation();
        forward();
      }
      for (int micro = 0; micro < 2; ++micro) {
        auto const waits = engine.no_sync(options.allow_no_sync && micro == 0);
        forward();
        for (std::size_t i = 5; i-- > 0;) {
          if (i < 4) layers[i].backward(static_cast<float>(mesh.rank() + step));
          if (relus) between[i].backward();
        }
      }
      auto const norm = fsdp::clip_grad_norm(engine, 1.0f);
      norm_value = norm.value();
      adamw.step(norm);
    }
    auto const gather = [](std::vector<float>& all) {
      return [&all](fsdp::TensorInfo const&, std::span<float const> values) {
        all.insert(all.end(), values.begin(), values.end());
      };
    };
    Outcome mine;
    fsdp::export_full(engine, gather(mine.weights));
    fsdp::export_gradients(engine, gather(mine.gradients));
    engine.synchronize();
    mine.norm = norm_value;
    mine.reserved = engine.account().reserved_state();
    mine.live = engine.account().live_state();
    mine.plan = fsdp::memory_plan(engine.plan_input());
    // Operations in order, whichever use they belong to: a Relu's use may gather ahead what the next one would gather.
    auto const& program = engine.program();
    for (auto const kind : fsdp::pass_kinds)
      for (auto const& turn : program.turns(kind))
        for (auto const* operations : {&turn.before, &turn.after})
          for (auto const& operation : *operations) mine.program += text(program, kind, operation);
    mine.calls = calls;
    if (mesh.rank() == 0) outcome = std::move(mine);
  });
  return outcome;
}

template <class P>
void check(fsdp::ShardingStrategy const& strategy, fsdp::EngineOptions const& options, int ranks) {
  INFO(strategy.name << " on " << ranks << ", prefetch " << options.prefetch << ", no_sync " << options.allow_no_sync);
  auto const expected = train<P>(strategy, options, ranks, false);
  auto const got = train<P>(strategy, options, ranks, true);
  REQUIRE(expected.weights.size() == 300 + 400 + 500 + 600);
  CHECK(got.calls == 5 * (4 * 2 * 2 + 1));
  CHECK(got.weights == expected.weights);
  CHECK(got.gradients == expected.gradients);
  CHECK(got.norm == expected.norm);
  INFO("expected:\n" << expected.program << "got:\n" << got.program);
  CHECK(got == expected);
}

}  // namespace

TEST_CASE("modules without parameters change no bit, no byte and no collective") {
  for (auto const prefetch : {0, 1, 2}) {
    for (fsdp::ShardingStrategy const& strategy : std::vector<fsdp::ShardingStrategy>{
             fsdp::FullShard{}, fsdp::ShardGradOp{}, fsdp::NoShard{}, fsdp::HybridShard<>{.group = 2}}) {
      check<fsdp::Fp32>(strategy, {.prefetch = prefetch, .allow_no_sync = prefetch == 1, .bucket_bytes = 2000}, 4);
      check<fsdp::Bf16Reduce>(strategy, {.prefetch = prefetch, .allow_no_sync = prefetch == 2}, 2 + strategy.group);
    }
    check<fsdp::Fp32>(fsdp::FullShard{}, {.prefetch = prefetch}, 1);
  }
}
