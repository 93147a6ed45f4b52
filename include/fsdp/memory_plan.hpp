// SPDX-License-Identifier: Apache-2.0
// What a run will need, in bytes: the one place that computes it. docs/strategies.md derives the formulas.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "fsdp/layout.hpp"
#include "fsdp/schedule.hpp"
#include "fsdp/step_walk.hpp"

namespace fsdp {

struct MemoryPlanInput {
  std::vector<std::int64_t> units;  ///< padded elements of each unit
  std::vector<std::size_t> uses;    ///< the unit of each use, in forward order; empty: each unit once, in order
  int shards = 1;                   ///< ranks per shard group
  KeepRules keep;
  PrefetchLists prefetch;             ///< of each use; empty: prefetch_by_depth(1, 1)
  std::int64_t max_ahead_bytes = 0;   ///< cap on bytes gathered ahead; 0: none
  int reshard_ranks = 0;              ///< ranks over which a unit stays sharded after forward; 0: `shards`
  bool keep_unsharded = false;        ///< every unit keeps a gather buffer of its own
  bool accumulate_unsharded = false;  ///< micro-steps need not reduce
  bool accumulate_replica = false;    ///< micro-steps need not all-reduce over replicas
  std::size_t master_bytes = 4;       ///< size of a master weight
  std::size_t param_bytes = 4;        ///< size of a parameter as forward reads it
  std::size_t reduce_bytes = 4;       ///< size of a gradient as backward writes it
  bool param_is_master = true;        ///< parameters have the master's type
  bool reduce_is_master = true;       ///< gradients have the shard's type, fp32
  int moments = 2;                    ///< optimizer values per parameter
  std::size_t moment_bytes = 4;       ///< size of each
};

/// Bytes per rank.
struct MemoryPlan {
  std::int64_t parameters = 0;        ///< master shards
  std::int64_t gradients = 0;         ///< gradient shards, and those that wait for the all-reduce over replicas
  std::int64_t optimizer = 0;         ///< optimizer state
  std::int64_t gather = 0;            ///< buffers of full parameters, and of what is kept after forward
  std::int64_t reduce = 0;            ///< slots of full gradients, and accumulators of unreduced ones
  std::int64_t live_forward = 0;      ///< highest use during a forward pass
  std::int64_t live_backward = 0;     ///< highest use during a backward pass that reduces
  std::int64_t live_accumulated = 0;  ///< in either, with gradients of an earlier micro-step waiting unreduced
  std::int64_t rest() const { return parameters + gradients + optimizer; }
  std::int64_t reserved() const { return rest() + gather + reduce; }

  std::size_t shared_gather_slots = 0;     ///< p
  std::size_t shared_reduce_slots = 0;     ///< q
  std::int64_t largest_shared_gather = 0;  ///< elements of the largest unit that takes turns in gather slots
  std::int64_t largest_shared_reduce = 0;  ///< and in gradient slots
  PrefetchLists ahead;                     ///< the prefetch lists, cut where max_ahead_bytes is reached
};

/// Bytes of a full-size buffer of `elements`.
constexpr std::int64_t slot_bytes(std::int64_t elements, std::size_t element_bytes) {
  return align_up(elements * static_cast<std::int64_t>(element_bytes), 256);
}

/// Computes reserved bytes, and the highest live bytes of a step that runs as declared.
inline MemoryPlan memory_plan(MemoryPlanInput const& input) {
  Schedule schedule(0);
  for (std::size_t unit = 0; input.uses.empty() && unit < input.units.size(); ++unit) schedule.declare(unit, "");
  for (auto const unit : input.uses) schedule.declare(unit, "");

  MemoryPlan plan;
  bool const gathers = input.shards > 1 || !input.param_is_master;
  bool const reduces = input.shards > 1 || !input.reduce_is_master;
  auto const param = static_cast<std::int64_t>(input.param_bytes);
  auto const grad = static_cast<std::int64_t>(input.reduce_bytes);

  StepWalk walk(schedule, input.units, input.keep);
  walk.own_gather_slots = input.keep_unsharded || !input.keep.reshards_after_forward;
  walk.own_reduce_slots = input.accumulate_unsharded && input.reduce_is_master;
  walk.kept_ranks = input.reshard_ranks;
  walk.max_ahead = input.max_ahead_bytes / param;
  walk.ahead = input.prefetch.forward.empty() ? prefetch_by_depth(schedule.size(), 1, 1) : input.prefetch;
  auto const bytes_forward = walk.forward();
  auto const bytes_backward = walk.backward(gathers ? param : 0, reduces ? grad : 0);
  plan.ahead = walk.ahead;

  std::int64_t total = 0;
  for (auto const padded : input.units) total += padded;
  std::int64_t const shard = total / input.shards;
  plan.parameters = shard * static_cast<std::int64_t>(input.master_bytes);
  plan.gradients = shard * (input.accumulate_replica ? 8 : 4);
  plan.optimizer = shard * input.moments * static_cast<std::int64_t>(input.moment_bytes);

  for (std::size_t unit = 0; unit < input.units.size(); ++unit) {
    auto const padded = input.units[unit];
    if (gathers && walk.own_gather_slot(unit)) plan.gather += slot_bytes(padded, input.param_bytes);
    if (gathers && walk.keeps_slice(unit)) plan.gather += slot_bytes(padded / input.reshard_ranks, input.param_bytes);
    if (reduces && walk.own_reduce_slot(unit)) plan.reduce += slot_bytes(padded, input.reduce_bytes);
    if (!walk.own_gather_slot(unit)) plan.largest_shared_gather = std::max(plan.largest_shared_gather, padded);
    if (!walk.own_reduce_slot(unit)) plan.largest_shared_reduce = std::max(plan.largest_shared_reduce, padded);
  }
  if (gathers) {
    plan.shared_gather_slots = walk.shared_gather_slots;
    plan.gather +=
        static_cast<std::int64_t>(plan.shared_gather_slots) * slot_bytes(plan.largest_shared_gather, input.param_bytes);
  }
  // Gradients in the shard's type wait in their slots; others are added up in fp32 accumulators.
  std::int64_t accumulators = 0;
  if (reduces) {
    plan.shared_reduce_slots = walk.shared_reduce_slots();
    plan.reduce += static_cast<std::int64_t>(plan.shared_reduce_slots) *
                   slot_bytes(plan.largest_shared_reduce, input.reduce_bytes);
    if (input.accumulate_unsharded && !input.reduce_is_master) accumulators = total * 4;
    plan.reduce += accumulators;
  }
  auto const parameters_forward = gathers ? bytes_forward * param : 0;
  plan.live_forward = plan.rest() + parameters_forward;
  plan.live_backward = plan.rest() + bytes_backward.highest;
  plan.live_accumulated = plan.rest() + accumulators + std::max(parameters_forward, bytes_backward.highest);
  if (reduces && walk.own_reduce_slots)
    plan.live_accumulated = plan.rest() + std::max(parameters_forward, bytes_backward.parameters) + total * grad;
  return plan;
}

}  // namespace fsdp
