// SPDX-License-Identifier: Apache-2.0
// Plans the memory of a run. docs/strategies.md states the formulas.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "fsdp/detail/step/compile_program.hpp"
#include "fsdp/detail/step/program.hpp"
#include "fsdp/layout.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

struct MemoryPlanInput : StepInput {
  int moments = 2;               ///< optimizer values per parameter
  std::size_t moment_bytes = 4;  ///< size of each
};

/// Bytes per rank.
struct MemoryPlan {
  std::int64_t parameters = 0;     ///< master shards
  std::int64_t gradients = 0;      ///< gradient shards, and those that wait for the all-reduce over replicas
  std::int64_t optimizer = 0;      ///< optimizer state
  std::int64_t host = 0;           ///< state in host memory; no other figure contains it
  std::int64_t gather = 0;         ///< buffers of full parameters, and of what is kept after forward
  std::int64_t reduce = 0;         ///< slots of full gradients, rounded ones, accumulators of unreduced ones, scratch
  std::int64_t live_forward = 0;   ///< peak in a forward pass
  std::int64_t live_backward = 0;  ///< peak in a backward pass that reduces
  std::int64_t live_accumulated = 0;  ///< peak in either, with unreduced gradients of an earlier micro-step
  std::int64_t live_most = 0;         ///< peak in any pass, with any scopes that the options allow
  std::int64_t rest() const { return parameters + gradients + optimizer; }
  std::int64_t reserved() const { return rest() + gather + reduce; }
};

namespace detail {

/// Bytes of full parameters and gradients in use while a program runs, pass after pass: an open counts its content,
/// until the next open or close of the buffer.
class LiveBytes {
 public:
  LiveBytes() = default;
  explicit LiveBytes(Program const& program) : program_(&program) {
    for (std::size_t pool = 0; pool < step::pools; ++pool)
      used_[pool] = std::vector<std::int64_t>(program.buffers.size(static_cast<step::Pool>(pool)));
  }

  std::int64_t bytes() const { return bytes_; }
  /// Runs a pass. @return the highest use in it
  [[gnu::cold]] std::int64_t run(PassKind kind, StepFlags flags, std::size_t path = 0) {
    auto highest = bytes_;
    auto const visit = [&](step::Operation const& operation) {
      run(operation);
      highest = std::max(highest, bytes_);
    };
    program_->for_each(kind, flags, visit, path);
    return highest;
  }
  /// @return the change of bytes in use
  std::int64_t run(step::Operation const& operation) {
    bool const opens = operation.primitive == step::Primitive::open;
    if (!opens && operation.primitive != step::Primitive::close) return 0;
    auto const cells = operation.all[0].cells;
    return set(used_[static_cast<std::size_t>(cells.pool)][step::Buffers::index(cells)], opens ? operation.bytes : 0);
  }
  /// Drops parameters of earlier passes.
  void reshard() {
    for (auto const pool : {step::Pool::gather, step::Pool::kept_slice}) forget(pool);
  }
  /// Forgets gradients of earlier passes.
  void discard() {
    for (auto const pool : {step::Pool::gradient_slot, step::Pool::wire, step::Pool::accumulator}) forget(pool);
  }

 private:
  std::int64_t set(std::int64_t& used, std::int64_t bytes) {
    auto const change = bytes - std::exchange(used, bytes);
    bytes_ += change;
    return change;
  }
  void forget(step::Pool pool) {
    for (auto& used : used_[static_cast<std::size_t>(pool)]) set(used, 0);
  }

  Program const* program_ = nullptr;
  std::array<std::vector<std::int64_t>, step::pools> used_;  ///< by pool, then Buffers::index()
  std::int64_t bytes_ = 0;
};

/// Peak of live bytes over all sequences of passes that the options allow. Most gradients wait after passes in the
/// declared order, which has all units; parameters are only kept for a pass of the same path.
[[gnu::cold]] inline std::int64_t highest_live_bytes(Program const& program, StepInput const& input) {
  std::int64_t highest = 0;
  auto const run = [&](LiveBytes& live, StepFlags flags, std::size_t path) {
    highest = std::max(highest, live.run(PassKind::forward, flags, path));
    auto frozen_backward = live;
    highest = std::max(highest, frozen_backward.run(PassKind::frozen_backward, flags, path));
    highest = std::max(highest, live.run(PassKind::backward, flags, path));
    auto evaluated = live;
    evaluated.reshard();
    highest = std::max(highest, evaluated.run(PassKind::evaluation, plain_step, path));
  };
  // The state after a micro-step depends only on its own flags. So two micro-steps in a row reach all states.
  LiveBytes const nothing(program);
  AllowedFlags const allowed(program, input);
  for (auto const first : allowed) {
    auto const flags = flags_after(plain_step) | first.step_flags();
    auto declared = nothing;
    run(declared, flags, 0);
    for (std::size_t path = 0; path < program.paths(); ++path) {
      auto left = declared;
      if (path > 0) left.reshard(), run(left, flags, path);
      for (auto const second : allowed) {
        auto live = left;
        run(live, flags_after(flags) | second.step_flags(), path);
        if (path == 0) continue;
        auto after_declared = declared;
        after_declared.reshard();
        run(after_declared, starts_sharded | (flags_after(flags) & waiting_flags) | second.step_flags(), path);
      }
    }
  }
  return highest;
}

}  // namespace detail

/// Reserved bytes, and the highest live bytes of a step, of a program that was compiled from `input`.
[[gnu::cold]] inline MemoryPlan memory_plan(Program const& program, MemoryPlanInput const& input) {
  MemoryPlan plan;
  for (std::size_t u = 0; u < program.units.size(); ++u) {
    auto const& unit = program.units[u];
    auto const shard = unit.shard();
    plan.parameters += shard * static_cast<std::int64_t>(size_of(unit.gathered_type()));
    if (!unit.trains()) continue;
    if (unit.offloads_masters) plan.host += shard * 4;
    (input.offload.gradients ? plan.host : plan.gradients) += shard * 4;
    if (unit.waits_for_replicas) plan.gradients += shard * 4;
    auto const moments = shard * input.moments * static_cast<std::int64_t>(input.moment_bytes);
    if (input.offload.moments) {
      plan.host += moments;
      plan.optimizer = std::max(plan.optimizer, 2 * moments);
    } else {
      plan.optimizer += moments;
    }
  }
  plan.parameters += 2 * program.staged_masters;
  plan.gradients += 2 * program.staged_gradients;
  for (auto const* slots : {&program.gather_slots, &program.kept_slots})
    for (auto const& slot : *slots) plan.gather += slot.bytes;
  for (auto const* slots : {&program.gradient_slots, &program.wires})
    for (auto const& slot : *slots) plan.reduce += slot.bytes;
  plan.reduce += program.scratch_bytes;
  plan.reduce += program.accumulator_elements * static_cast<std::int64_t>(sizeof(float));

  detail::LiveBytes plain(program), waiting = plain;
  auto flags = plain_step;
  plan.live_forward = plan.rest() + plain.run(PassKind::forward, flags);
  plan.live_backward = plan.rest() + plain.run(PassKind::backward, flags);
  if (input.allow_no_sync) {
    auto const first = starts_sharded | BackwardFlags{.gradient_sync = false}.step_flags() | all_reduced;
    for (auto const kind : {PassKind::forward, PassKind::backward}) waiting.run(kind, first);
    flags = flags_after(first) | BackwardFlags{}.step_flags();
  }
  auto const in_forward = waiting.run(PassKind::forward, flags), in_backward = waiting.run(PassKind::backward, flags);
  plan.live_accumulated = plan.rest() + std::max(in_forward, in_backward);
  plan.live_most = plan.rest() + detail::highest_live_bytes(program, input);
  return plan;
}
[[gnu::cold]] inline MemoryPlan memory_plan(MemoryPlanInput const& input) {
  return memory_plan(compile_program(input), input);
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
