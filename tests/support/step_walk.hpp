// SPDX-License-Identifier: Apache-2.0
// One training step on paper, written before there were programs, and without them: an oracle for their memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "fsdp/memory_plan.hpp"
#include "fsdp/schedule.hpp"

namespace fsdp::testing {

/// Walks the declared uses forward and back as the engine will, counting elements. `forward()` comes first and cuts
/// `ahead.forward` where `max_ahead` is reached; `backward()` goes on from where it ended.
class StepWalk {
 public:
  /// @param padded  elements of each unit; it and the schedule must outlive the walk
  StepWalk(Schedule const& declared, std::vector<std::int64_t> const& padded, KeepRules rules)
      : schedule(declared), units(padded), keep(rules), unsharded_(padded.size()), waiting_(padded.size()) {}

  Schedule const& schedule;
  std::vector<std::int64_t> const& units;
  KeepRules keep;
  bool own_gather_slots = false;  ///< every unit has a buffer of its own
  bool own_reduce_slots = false;  ///< every unit has a gradient slot of its own
  int kept_ranks = 0;             ///< after forward a unit stays sharded over so many ranks; 0: nothing stays
  std::int64_t max_ahead = 0;     ///< elements that may be gathered and not yet in use; 0: any
  PrefetchLists ahead;

  std::size_t shared_gather_slots = 0;  ///< most units that took turns at a time

  bool own_gather_slot(std::size_t unit) const { return own_gather_slots || schedule.shared_unit(unit); }
  bool own_reduce_slot(std::size_t unit) const { return own_reduce_slots || schedule.shared_unit(unit); }
  /// A slice of the unit stays after its forward.
  bool keeps_slice(std::size_t unit) const { return kept_ranks > 0 && schedule.drops_after_forward(unit, keep); }
  std::size_t shared_reduce_slots() const {
    std::size_t pooled = 0;
    for (std::size_t unit = 0; unit < units.size(); ++unit)
      if (!own_reduce_slot(unit)) ++pooled;
    return std::min<std::size_t>(pooled, 2);
  }

  /// @return the most elements unsharded at a time, kept slices included
  std::int64_t forward() {
    std::int64_t highest = 0;
    for (std::size_t use = 0; use < schedule.size(); ++use) {
      auto const unit = schedule.unit(use);
      begin(unit, ahead.forward[use]);
      highest = std::max(highest, elements_ + slices_);
      if (schedule.keeps_after_forward(use, keep, false)) continue;
      if (keeps_slice(unit)) slices_ += units[unit] / kept_ranks;  // copied from the full unit: both are there
      highest = std::max(highest, elements_ + slices_);
      drop(unit);
    }
    return highest;
  }

  struct Backward {
    std::int64_t highest = 0;     ///< most bytes of parameters and gradients at a time
    std::int64_t parameters = 0;  ///< most bytes of parameters alone
  };
  /// Gradients of a unit are counted until its slot's next lease, or the end of the pass.
  Backward backward(std::int64_t param_bytes, std::int64_t reduce_bytes) {
    std::vector<std::int64_t> turns(shared_reduce_slots(), 0);
    std::size_t position = 0;
    std::int64_t gradients = 0;
    Backward most;
    for (auto use = schedule.size(); use-- > 0;) {
      auto const unit = schedule.unit(use);
      begin(unit, ahead.backward[use]);
      auto const parameters = (elements_ + slices_) * param_bytes;
      most.parameters = std::max(most.parameters, parameters);
      most.highest = std::max(most.highest, parameters + gradients * reduce_bytes);
      if (schedule.last_use_of_unit(use)) {
        gradients += units[unit];
        if (!own_reduce_slot(unit)) gradients -= std::exchange(turns[position++ % turns.size()], units[unit]);
        most.highest = std::max(most.highest, parameters + gradients * reduce_bytes);
      }
      if (!schedule.first_use_of_unit(use)) continue;
      drop(unit);
      if (keeps_slice(unit)) slices_ -= units[unit] / kept_ranks;
    }
    return most;
  }

 private:
  /// A use of `unit` begins: it and what `list` names are gathered; the list is cut where max_ahead is reached.
  void begin(std::size_t unit, std::vector<std::size_t>& list) {
    gather(unit);
    if (std::exchange(waiting_[unit], 0) != 0) waiting_elements_ -= units[unit];
    std::size_t taken = 0;
    for (; taken < list.size(); ++taken) {
      auto const next = schedule.unit(list[taken]);
      if (unsharded_[next] != 0) continue;
      if (max_ahead > 0 && waiting_elements_ + units[next] > max_ahead) break;
      gather(next);
      waiting_[next] = 1;
      waiting_elements_ += units[next];
    }
    list.resize(taken);
    shared_gather_slots = std::max(shared_gather_slots, in_turn_);
  }
  void gather(std::size_t unit) {
    if (unsharded_[unit] != 0) return;
    unsharded_[unit] = 1;
    elements_ += units[unit];
    if (!own_gather_slot(unit)) ++in_turn_;
  }
  void drop(std::size_t unit) {
    if (std::exchange(unsharded_[unit], 0) == 0) return;
    elements_ -= units[unit];
    if (!own_gather_slot(unit)) --in_turn_;
  }

  std::vector<char> unsharded_, waiting_;  // flags: std::exchange takes no reference into a vector of bool
  std::size_t in_turn_ = 0;                ///< units that have one of the buffers that take turns
  std::int64_t elements_ = 0, slices_ = 0, waiting_elements_ = 0;
};

/// The memory plan of such a walk.
inline MemoryPlan walked_memory_plan(MemoryPlanInput const& input) {
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

  std::int64_t total = 0;
  for (auto const padded : input.units) total += padded;
  std::int64_t const shard = total / input.shards;
  plan.parameters = shard * static_cast<std::int64_t>(input.master_bytes);
  plan.gradients = shard * (input.accumulate_replica ? 8 : 4);
  plan.optimizer = shard * input.moments * static_cast<std::int64_t>(input.moment_bytes);

  std::int64_t largest_gather = 0, largest_reduce = 0;
  for (std::size_t unit = 0; unit < input.units.size(); ++unit) {
    auto const padded = input.units[unit];
    if (gathers && walk.own_gather_slot(unit)) plan.gather += slot_bytes(padded, input.param_bytes);
    if (gathers && walk.keeps_slice(unit)) plan.gather += slot_bytes(padded / input.reshard_ranks, input.param_bytes);
    if (reduces && walk.own_reduce_slot(unit)) plan.reduce += slot_bytes(padded, input.reduce_bytes);
    if (!walk.own_gather_slot(unit)) largest_gather = std::max(largest_gather, padded);
    if (!walk.own_reduce_slot(unit)) largest_reduce = std::max(largest_reduce, padded);
  }
  if (gathers) {
    plan.gather += static_cast<std::int64_t>(walk.shared_gather_slots) * slot_bytes(largest_gather, input.param_bytes);
  }
  // Gradients in the shard's type wait in their slots; others are added up in fp32 accumulators.
  std::int64_t accumulators = 0;
  if (reduces) {
    plan.reduce +=
        static_cast<std::int64_t>(walk.shared_reduce_slots()) * slot_bytes(largest_reduce, input.reduce_bytes);
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

}  // namespace fsdp::testing
