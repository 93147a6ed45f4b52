// SPDX-License-Identifier: Apache-2.0
// One training step on paper, written before there were programs, and without them: an oracle for their memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "fsdp/detail/step/memory_plan.hpp"
#include "fsdp/detail/step/uses.hpp"

namespace fsdp::testing {

inline std::size_t param_bytes(StepInput const& input) { return size_of(input.units.at(0).types.parameter); }
inline std::size_t reduce_bytes(StepInput const& input) { return size_of(input.units.at(0).types.gradient); }
inline bool writes_fp32(StepInput const& input) { return input.units.at(0).types.gradient == DType::f32; }

/// Walks the declared uses forward and back as the engine will, counting elements. `forward()` comes first and cuts
/// `ahead.forward` where `max_ahead` is reached; `backward()` goes on from where it ended.
class StepWalk {
 public:
  /// @param declared  the uses; it and the input must outlive the walk
  StepWalk(UseOrder const& declared, StepInput const& of)
      : ahead(of.prefetch.forward.empty() ? prefetch_by_depth(declared, 1, 1) : of.prefetch),
        schedule(declared),
        input(of),
        unsharded_(of.units.size()),
        waiting_(of.units.size()) {}

  PrefetchLists ahead;
  std::size_t shared_gather_slots = 0;  ///< most units that took turns at a time

  std::int64_t elements(std::size_t unit) const { return input.units[unit].elements; }
  /// Several ranks share the unit.
  bool divided(std::size_t unit) const { return input.units[unit].sharded && input.shards > 1; }
  bool gathers(std::size_t unit) const {
    return divided(unit) || input.units[unit].types.parameter != input.units[unit].gathered_type();
  }
  bool reduces(std::size_t unit) const { return divided(unit) || !writes_fp32(input); }
  bool own_gather_slot(std::size_t unit) const {
    return input.allow_keep_unsharded || !input.units[unit].reshards_after_forward || schedule.unit_returns(unit);
  }
  bool own_reduce_slot(std::size_t unit) const {
    return (input.allow_no_sync && writes_fp32(input)) || schedule.unit_returns(unit);
  }
  /// The unit is there when the use's forward ends, and stays.
  bool stays(std::size_t use) const {
    if (schedule.returns(use)) return input.keep_root;
    for (auto later = use + 1; later < schedule.size(); ++later)
      if (schedule.unit(later) == schedule.unit(use)) return true;
    if (!input.units[schedule.unit(use)].reshards_after_forward) return true;
    if (!input.keep_last) return false;
    for (auto later = use + 1; later < schedule.size(); ++later)
      if (!schedule.returns(later) && gathers(schedule.unit(later)) &&
          input.units[schedule.unit(later)].reshards_after_forward)
        return false;
    return true;
  }
  /// A slice of the unit stays after its forward.
  bool keeps_slice(std::size_t unit) const {
    if (input.reshard_ranks == 0 || !divided(unit) || schedule.unit_returns(unit)) return false;
    for (auto use = schedule.size(); use-- > 0;)
      if (schedule.unit(use) == unit) return !stays(use);
    return false;
  }
  /// The unit's gradients are rounded for the sum over ranks, in a buffer that takes turns; or in the buckets' one.
  bool rounds(std::size_t unit) const { return input.wire && divided(unit); }
  bool rounds_bucket(std::size_t unit) const {
    return input.wire && !divided(unit) && input.shards * input.replicas > 1;
  }
  std::size_t wires() const {
    std::size_t rounded = 0;
    for (std::size_t unit = 0; unit < input.units.size(); ++unit) rounded += rounds(unit) ? 1u : 0u;
    return std::min<std::size_t>(rounded, input.replicas > 1 && !input.allow_no_replica_sync ? 2 : 1);
  }
  std::size_t shared_reduce_slots() const {
    std::size_t pooled = 0;
    for (std::size_t unit = 0; unit < input.units.size(); ++unit)
      if (reduces(unit) && !own_reduce_slot(unit)) ++pooled;
    return std::min<std::size_t>(pooled, 2);
  }

  /// @return the most elements unsharded at a time, kept slices included
  std::int64_t forward() {
    std::int64_t highest = 0;
    for (std::size_t use = 0; use < schedule.size(); ++use) {
      auto const unit = schedule.unit(use);
      begin(unit, ahead.forward[use]);
      highest = std::max(highest, elements_ + slices_);
      if (stays(use)) continue;
      if (keeps_slice(unit)) slices_ += elements(unit) / input.reshard_ranks;  // copied: both are there
      highest = std::max(highest, elements_ + slices_);
      drop(unit);
    }
    return highest;
  }

  struct Backward {
    std::int64_t highest = 0;     ///< most bytes of parameters and gradients at a time
    std::int64_t parameters = 0;  ///< most bytes of parameters and rounded gradients alone
  };
  /// Gradients of a unit are counted until its slot's next lease, or the end of the pass; a bucket is a unit.
  Backward backward(std::int64_t param_bytes, std::int64_t reduce_bytes) {
    std::vector<std::int64_t> turns(shared_reduce_slots(), 0), wired(wires() + 1, 0);
    std::size_t position = 0, wire_position = 0;
    std::int64_t gradients = 0, rounded = 0;  // bytes of rounded ones
    Backward most;
    for (auto use = schedule.size(); use-- > 0;) {
      auto const unit = schedule.unit(use);
      begin(unit, ahead.backward[use]);
      auto const parameters = (elements_ + slices_) * param_bytes + rounded;
      most.parameters = std::max(most.parameters, parameters);
      most.highest = std::max(most.highest, parameters + gradients * reduce_bytes);
      if (schedule.last_use_of_unit(use) && reduces(unit)) {
        gradients += elements(unit);
        if (!own_reduce_slot(unit)) gradients -= std::exchange(turns[position++ % turns.size()], elements(unit));
        most.highest = std::max(most.highest, parameters + gradients * reduce_bytes);
      }
      if (!schedule.first_use_of_unit(use)) continue;
      drop(unit);
      if (keeps_slice(unit)) slices_ -= elements(unit) / input.reshard_ranks;
      if (!rounds(unit) && !rounds_bucket(unit)) continue;
      auto& wire = rounds(unit) ? wired[wire_position++ % wires()] : wired.back();
      auto const bytes = elements(unit) * static_cast<std::int64_t>(size_of(*input.wire));
      rounded += bytes - std::exchange(wire, bytes);
      auto const left = (elements_ + slices_) * param_bytes + rounded;
      most.parameters = std::max(most.parameters, left);
      most.highest = std::max(most.highest, left + gradients * reduce_bytes);
    }
    return most;
  }

 private:
  /// A use of `unit` begins: it and what `list` names are gathered; the list is cut where max_ahead is reached.
  void begin(std::size_t unit, std::vector<std::size_t>& list) {
    gather(unit);
    if (std::exchange(waiting_[unit], 0) != 0) waiting_elements_ -= elements(unit);
    auto const max_ahead = input.max_ahead_bytes / static_cast<std::int64_t>(param_bytes(input));
    std::size_t taken = 0;
    for (; taken < list.size(); ++taken) {
      auto const next = schedule.unit(list[taken]);
      if (!gathers(next) || unsharded_[next] != 0) continue;
      if (max_ahead > 0 && waiting_elements_ + elements(next) > max_ahead) break;
      gather(next);
      waiting_[next] = 1;
      waiting_elements_ += elements(next);
    }
    list.resize(taken);
    shared_gather_slots = std::max(shared_gather_slots, in_turn_);
  }
  void gather(std::size_t unit) {
    if (!gathers(unit) || unsharded_[unit] != 0) return;
    unsharded_[unit] = 1;
    elements_ += elements(unit);
    if (!own_gather_slot(unit)) ++in_turn_;
  }
  void drop(std::size_t unit) {
    if (std::exchange(unsharded_[unit], 0) == 0) return;
    elements_ -= elements(unit);
    if (!own_gather_slot(unit)) --in_turn_;
  }

  UseOrder const& schedule;
  StepInput const& input;
  std::vector<char> unsharded_, waiting_;  // flags: std::exchange takes no reference into a vector of bool
  std::size_t in_turn_ = 0;                ///< units that have one of the buffers that take turns
  std::int64_t elements_ = 0, slices_ = 0, waiting_elements_ = 0;
};

/// The order of uses that the input declares.
inline UseOrder schedule_of(StepInput const& input) {
  UseOrder schedule;
  for (std::size_t unit = 0; input.uses.empty() && unit < input.units.size(); ++unit) schedule.declare(unit, "");
  for (auto const unit : input.uses) schedule.declare(unit, "");
  return schedule;
}

/// The memory plan of such a walk.
inline MemoryPlan walked_memory_plan(MemoryPlanInput const& input) {
  auto const schedule = schedule_of(input);
  auto const param = static_cast<std::int64_t>(param_bytes(input));
  auto const grad = static_cast<std::int64_t>(reduce_bytes(input));
  StepWalk walk(schedule, input);
  auto const bytes_forward = walk.forward() * param;
  auto const bytes_backward = walk.backward(param, grad);

  MemoryPlan plan;
  std::int64_t largest_gather = 0, largest_reduce = 0, waiting = 0, largest_rounded = 0, largest_bucket = 0;
  bool const slots_wait = input.allow_no_sync && writes_fp32(input);
  for (std::size_t unit = 0; unit < input.units.size(); ++unit) {
    auto const padded = walk.elements(unit), shard = walk.divided(unit) ? padded / input.shards : padded;
    bool const partial =
        input.allow_no_replica_sync && input.units[unit].sharded && input.replicas > 1 && walk.reduces(unit);
    plan.parameters += shard * 4;
    plan.gradients += shard * (partial ? 8 : 4);
    plan.optimizer += shard * input.moments * static_cast<std::int64_t>(input.moment_bytes);
    if (walk.gathers(unit)) {
      if (walk.own_gather_slot(unit)) plan.gather += slot_bytes(padded, param_bytes(input));
      if (walk.keeps_slice(unit)) plan.gather += slot_bytes(padded / input.reshard_ranks, param_bytes(input));
      if (!walk.own_gather_slot(unit)) largest_gather = std::max(largest_gather, padded);
    }
    if (walk.rounds(unit)) largest_rounded = std::max(largest_rounded, padded);
    if (walk.rounds_bucket(unit)) largest_bucket = std::max(largest_bucket, padded);
    if (!walk.reduces(unit)) continue;
    if (walk.own_reduce_slot(unit)) plan.reduce += slot_bytes(padded, reduce_bytes(input));
    if (!walk.own_reduce_slot(unit)) largest_reduce = std::max(largest_reduce, padded);
    // Gradients in the shard's type wait in their slots; others are added up in fp32 accumulators.
    if (input.allow_no_sync) waiting += padded * (slots_wait ? grad : 4);
  }
  plan.gather += static_cast<std::int64_t>(walk.shared_gather_slots) * slot_bytes(largest_gather, param_bytes(input));
  plan.reduce +=
      static_cast<std::int64_t>(walk.shared_reduce_slots()) * slot_bytes(largest_reduce, reduce_bytes(input));
  if (!slots_wait) plan.reduce += waiting;
  if (input.wire)
    plan.reduce += static_cast<std::int64_t>(walk.wires()) * slot_bytes(largest_rounded, size_of(*input.wire)) +
                   slot_bytes(largest_bucket, size_of(*input.wire));
  plan.live_forward = plan.rest() + bytes_forward;
  plan.live_backward = plan.rest() + bytes_backward.highest;
  plan.live_accumulated =
      plan.rest() + waiting + std::max(bytes_forward, slots_wait ? bytes_backward.parameters : bytes_backward.highest);
  return plan;
}

}  // namespace fsdp::testing
