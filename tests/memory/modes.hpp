// SPDX-License-Identifier: Apache-2.0
// Bytes of a run under one strategy, precision and way to accumulate: measured, planned, and by formula.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/fsdp.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"
#include "tests/catch.hpp"
#include "tests/support/shard_group.hpp"

namespace modes {

using Device = fsdp::host::Device;
using Comm = fsdp::local::Communicator<Device>;

/// A module that has parameters and does nothing: bytes are counted on the host thread.
struct Idle {
  std::int64_t elements;
  template <class T>
  struct Params {
    fsdp::Tensor<T, 1> weight;
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor("weight", p.weight, {elements});
  }
  template <class W>
  void forward(Device::Stream&, W const&) const {}
  template <class W, class G>
  void backward(Device::Stream&, W const&, G const&) const {}
};

enum class Mode {
  synced,
  unsynced,
  replica
};  ///< micro-steps reduce each, the last; all-reduce over replicas the last

struct Setup {
  int ranks = 4;
  int shard_group = 0;
  Mode mode = Mode::synced;
  fsdp::EngineOptions options{};
  std::int64_t root = 600;  ///< elements of a unit that is used first and last; 0: none
  std::vector<std::int64_t> blocks = std::vector<std::int64_t>(5, 1500);
};

/// Bytes, of rank 0.
struct Bytes {
  std::int64_t baseline = 0;     ///< reserved before the engine is sealed
  std::int64_t before_adam = 0;  ///< in use after sealing
  std::int64_t reserved = 0;     ///< after two steps
  std::int64_t rest = 0;         ///< in use between steps
  std::int64_t forward = 0;      ///< highest use in a step's first forward pass
  std::int64_t backward = 0;     ///< in a backward pass that finds nothing waiting
  std::int64_t accumulated = 0;  ///< in the micro-steps after the first
  std::int64_t reserved_later = 0, rest_later = 0;
  std::int64_t after = 0;      ///< reserved once the optimizer is gone, less what it had
  bool total_constant = true;  ///< activations, workspaces and scalars too
};

struct Measured {
  Bytes bytes;
  fsdp::MemoryPlan plan;
  std::vector<std::int64_t> units;  ///< padded elements; the root first
  std::int64_t shards = 1;
};

template <class P>
Measured measure(fsdp::ShardingStrategy const& strategy, Setup const& setup, int more_steps = 3) {
  Measured result;
  fsdp::local::run(setup.ranks, Device{}, [&](Comm comm) {
    bool const first = comm.rank() == 0;
    fsdp::Mesh<Comm> mesh(std::move(comm));
    auto options = setup.options;
    options.allow_no_sync = setup.mode == Mode::unsynced;
    options.allow_no_replica_sync = setup.mode == Mode::replica;
    using Engine = fsdp::Engine<Comm, P>;
    Engine engine(mesh, fsdp::testing::in_groups_of(setup.shard_group, strategy), options);
    std::vector<fsdp::ShardedModule<Idle, Engine>> modules;
    std::optional<fsdp::UnitId> root;
    if (setup.root > 0) modules.push_back(engine.shard(Idle{setup.root}, "ends", *(root = engine.add_unit("root"))));
    for (std::size_t i = 0; i < setup.blocks.size(); ++i)
      modules.push_back(engine.shard(Idle{setup.blocks[i]}, std::to_string(i)));
    if (root) modules.push_back(engine.shard(Idle{setup.root}, "ends", *root));

    Bytes bytes;
    auto& account = engine.account();
    bytes.baseline = account.reserved_total();
    engine.seal();
    bytes.before_adam = account.live_state();
    auto const forward = [&] {
      for (auto& part : modules) part.forward();
    };
    auto const backward = [&] {
      for (auto i = modules.size(); i-- > 0;) modules[i].backward();
    };
    auto const micro_step = [&](bool last) {
      auto const waits = engine.no_sync(setup.mode == Mode::unsynced && !last);
      auto const group_sums_wait = engine.no_replica_sync(setup.mode == Mode::replica && !last);
      forward(), backward();
    };
    {
      fsdp::AdamW adamw(engine);
      bytes.rest = account.live_state();
      auto const steps = [&](int count) {
        for (int step = 0; step < count; ++step) {
          for (int micro = 0; micro < 3; ++micro) micro_step(micro == 2);
          auto const norm = fsdp::clip_grad_norm(engine, 1.0f);
          adamw.step(norm);
        }
      };
      steps(2);
      bytes.reserved = account.reserved_state();
      auto const total = account.reserved_total();
      // A backward pass with nothing waiting that reduces, then a step of micro-steps.
      account.reset_peak(), forward(), bytes.forward = account.peak_live_state();
      account.reset_peak(), backward(), bytes.backward = account.peak_live_state();
      adamw.step();
      micro_step(false);
      account.reset_peak();
      micro_step(false);
      micro_step(true);
      bytes.accumulated = account.peak_live_state();
      adamw.step();
      steps(more_steps);
      bytes.reserved_later = account.reserved_state();
      bytes.rest_later = account.live_state();
      bytes.total_constant = account.reserved_total() == total;
    }
    auto const plan = fsdp::memory_plan(engine.plan_input());
    bytes.after = account.reserved_state() + plan.optimizer;
    if (!first) return;
    result = {bytes, plan, {}, engine.placement().shards};
    for (std::size_t u = 0; u < engine.shards().size(); ++u) result.units.push_back(engine.shards()[u].full_numel());
  });
  return result;
}

/// The formulas of docs/strategies.md for a root of B elements and n equal blocks of U, n >= k + 2, written down
/// without the plan's code.
struct Formula {
  std::int64_t rest, reserved, forward, backward, accumulated;
};
template <class P>
Formula formula(fsdp::ShardingStrategy const& strategy, Setup const& setup, Measured const& m) {
  std::int64_t const w = sizeof(typename P::Param), g = sizeof(typename P::Reduce), master = sizeof(typename P::Master);
  std::int64_t const n = static_cast<std::int64_t>(setup.blocks.size());
  std::int64_t const B = m.units[0], U = m.units[1], Psi = B + n * U, shard = Psi / m.shards;
  std::int64_t const p = setup.options.prefetch + 1, q = 2;
  auto const buffer = [](std::int64_t bytes) { return (bytes + 255) / 256 * 256; };
  bool const gathers = m.shards > 1 || !std::is_same_v<typename P::Param, typename P::Master>;
  bool const reduces = m.shards > 1 || !std::is_same_v<typename P::Reduce, float>;
  bool const slots_wait = g == 4;  // unreduced gradients wait in fp32 slots, or in fp32 accumulators beside the slots
  bool const unsynced = setup.mode == Mode::unsynced;
  bool const partial = setup.mode == Mode::replica && reduces;

  Formula f{};
  f.rest = shard * (master + (partial ? 8 : 4) + 8);
  std::int64_t gather = 0, reduce = 0, in_forward = 0, in_backward = 0;
  if (gathers) {
    gather = strategy.reshards_after_forward ? p * buffer(U * w) + buffer(B * w) : n * buffer(U * w) + buffer(B * w);
    in_forward = strategy.reshards_after_forward ? (p * U + B) * w : Psi * w;
    in_backward = in_forward;
  }
  // Two gradient slots fill while the first block is dropped: without resharding after forward that is one block of
  // parameters less at one of gradients more.
  std::int64_t at_peak = in_backward + (q * U + B) * g;
  if (gathers && !strategy.reshards_after_forward)
    at_peak = in_backward + (U + B) * g + std::max<std::int64_t>(0, U * g - U * w);
  std::int64_t waiting = 0;
  if (reduces) {
    waiting = unsynced ? Psi * 4 : 0;
    reduce = unsynced && slots_wait ? n * buffer(U * g) + buffer(B * g) : q * buffer(U * g) + buffer(B * g);
    if (unsynced && !slots_wait) reduce += waiting;
  }
  f.reserved = f.rest + gather + reduce;
  f.forward = f.rest + in_forward;
  f.backward = f.rest + in_backward;
  f.accumulated = f.backward;
  if (reduces) {
    f.backward = f.rest + at_peak;
    // Slots of units' own count until the pass ends: one block more than all, whatever the prefetch.
    if (unsynced && slots_wait && gathers) f.backward = f.rest + (U + B) * w + Psi * g;
    f.accumulated = f.rest + waiting + (unsynced && slots_wait ? in_backward : at_peak);
  }
  if (!setup.options.reduce_dtype || setup.ranks == 1) return f;
  // Rounded gradients have a buffer: of the largest unit, two where it is all-reduced as well; of the bucket, which is
  // all of them here and begins when no parameters are left. A unit's count beside the gradients of the next two.
  std::int64_t const rounded = 2;
  if (m.shards > 1) {
    std::int64_t const wires = setup.shard_group > 0 && !partial ? 2 : 1;
    f.reserved += wires * buffer(std::max(U, B) * rounded);
    bool const falls = !strategy.reshards_after_forward;  // parameters: by a block whenever one has been rounded
    bool const own_slots = unsynced && slots_wait;
    f.backward += falls && !own_slots ? 0 : wires * U * rounded;
    if (falls && !own_slots)
      f.backward = std::max(f.backward, f.rest + in_backward - U * w + U * rounded + (q * U + B) * g);
    f.accumulated += falls ? 0 : wires * U * rounded;
    if (falls && !own_slots) f.accumulated = f.backward;
  } else {
    f.reserved += buffer(Psi * rounded);
    f.backward = std::max(f.backward, f.rest + Psi * rounded);
    f.accumulated = std::max(f.accumulated, f.rest + Psi * rounded);
  }
  return f;
}

inline void check_steady(Measured const& m) {
  CHECK(m.bytes.baseline == 0);
  CHECK(m.bytes.before_adam == m.plan.parameters);
  CHECK(m.bytes.total_constant);
  CHECK(m.bytes.reserved_later == m.bytes.reserved);
  CHECK(m.bytes.rest_later == m.bytes.rest);
  CHECK(m.bytes.after == m.bytes.reserved);
}

/// The account equals the plan.
inline void check_plan(Measured const& m) {
  check_steady(m);
  CHECK(m.plan.reserved() == m.bytes.reserved);
  CHECK(m.plan.rest() == m.bytes.rest);
  CHECK(m.plan.live_forward == m.bytes.forward);
  CHECK(m.plan.live_backward == m.bytes.backward);
  CHECK(m.plan.live_accumulated == m.bytes.accumulated);
}

/// The account equals the formulas, and the plan both.
template <class P>
void check(fsdp::ShardingStrategy const& strategy, Setup const& setup) {
  INFO(strategy.name << ", " << setup.ranks << " ranks, mode " << static_cast<int>(setup.mode) << ", prefetch "
                     << setup.options.prefetch);
  auto const m = measure<P>(strategy, setup);
  check_plan(m);
  auto const f = formula<P>(strategy, setup, m);
  CHECK(m.bytes.reserved == f.reserved);
  CHECK(m.bytes.rest == f.rest);
  CHECK(m.bytes.forward == f.forward);
  CHECK(m.bytes.backward == f.backward);
  CHECK(m.bytes.accumulated == f.accumulated);
}

/// Every strategy and way to accumulate in one precision.
template <class P>
void check_all(fsdp::EngineOptions const& options = {}) {
  Setup const plain{.options = options};
  for (auto const mode : {Mode::synced, Mode::unsynced}) {
    for (int const prefetch : {0, 1, 2}) {
      auto setup = plain;
      setup.mode = mode;
      setup.options.prefetch = prefetch;
      check<P>(fsdp::FullShard{}, setup);
      setup.ranks = 2;
      check<P>(fsdp::FullShard{}, setup);
    }
    auto setup = plain;
    setup.mode = mode;
    check<P>(fsdp::ShardGradOp{}, setup);
    check<P>(fsdp::NoShard{}, setup);
    setup.ranks = 1;
    check<P>(fsdp::FullShard{}, setup);
  }
  for (auto const mode : {Mode::synced, Mode::unsynced, Mode::replica}) {
    auto setup = plain;
    setup.mode = mode;
    setup.shard_group = 2;
    check<P>(fsdp::HybridShard<>{}, setup);
  }
}

}  // namespace modes
