// SPDX-License-Identifier: Apache-2.0
// Decides which buffers a step has, how large they are, which units use them, and which units stay unsharded after
// forward.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/layout.hpp"
#include "fsdp/step/program.hpp"
#include "fsdp/step/schedule.hpp"
#include "fsdp/step/step_input.hpp"

namespace fsdp {

/// Buckets of NoShard: contiguous ranges of all gradients in the order in which backward completes them. Cuts elements
/// of `element_bytes` into ranges: the first of about `first_bytes`, the others of about `bucket_bytes` (both rounded
/// up to layout_alignment elements). A unit may be split, and several may be merged.
/// @param ends          of each unit, in elements
/// @param bucket_bytes  0: one bucket a unit
inline std::vector<Range> make_buckets(std::vector<std::int64_t> const& ends, std::size_t element_bytes,
                                       std::int64_t bucket_bytes, std::int64_t first_bytes) {
  std::vector<Range> buckets;
  auto const total = ends.empty() ? 0 : ends.back();
  std::int64_t begin = 0;
  if (bucket_bytes <= 0) {
    for (auto const end : ends) {
      buckets.push_back({begin, end});
      begin = end;
    }
    return buckets;
  }
  auto const elements = [&](std::int64_t bytes) {
    auto const size = static_cast<std::int64_t>(element_bytes);
    return align_up((bytes + size - 1) / size, layout_alignment);
  };
  while (begin < total) {
    auto const end = std::min(total, begin + elements(buckets.empty() ? first_bytes : bucket_bytes));
    buckets.push_back({begin, end});
    begin = end;
  }
  return buckets;
}

namespace detail {

/// Describes units, and assigns buffers to them.
///
/// [Note: Wires] If ranks sum in a narrower type than backward writes, gradients are rounded into a send buffer
/// (*wire*), and the wire is reduced. The slot is free after rounding. The reduce stream reduces one unit after
/// another, so one wire is enough for all units. With replicas there are two wires: one unit is reduce-scattered while
/// the unit before it is all-reduced. Buckets are rounded on the replicate stream, into a wire of their own.
class BufferPlanner {
 public:
  [[gnu::cold]] explicit BufferPlanner(StepInput const& input) : input_(input) {
    for (std::size_t unit = 0; input.uses.empty() && unit < input.units.size(); ++unit) schedule_.declare(unit, "");
    for (auto const unit : input.uses) schedule_.declare(unit, "");
  }

 protected:
  /// All but the slots that units share.
  [[gnu::cold]] void plan_units() {
    describe_units();
    find_backward_end();
    order_completion();
    give_wires();
    give_own_slots();
  }
  /// @param in_turn  so many slots of parameters are shared
  [[gnu::cold]] void share_slots(std::size_t in_turn) {
    auto& p = program_;
    std::int64_t largest_gather = 0, largest_gradient = 0;
    std::size_t reduced_in_turn = 0;
    for (std::uint32_t u = 0; u < p.units.size(); ++u) {
      if (gathers(u) && !own_gather_slot(u)) largest_gather = std::max(largest_gather, p.units[u].elements);
      if (p.units[u].writes_shards || own_gradient_slot(u)) continue;
      largest_gradient = std::max(largest_gradient, p.units[u].elements);
      ++reduced_in_turn;
    }
    for (std::size_t slot = 0; slot < in_turn; ++slot) add(p.gather_slots, {largest_gather});
    // One is filled while the other is reduced.
    for (std::size_t slot = 0; slot < std::min<std::size_t>(reduced_in_turn, 2); ++slot)
      add(p.gradient_slots, {largest_gradient});
    lease_gradient_slots();
    p.buffers.set_slots(step::Pool::gather, p.gather_slots.size());
    p.buffers.set_slots(step::Pool::kept, p.kept_slots.size());
    p.buffers.set_slots(step::Pool::gradient_slot, p.gradient_slots.size());
    p.buffers.set_slots(step::Pool::wire, p.wires.size());
  }

  // Answers about units and uses.
  bool gathers(std::size_t unit) const { return !program_.units[unit].reads_masters; }
  bool own_gather_slot(std::size_t unit) const {
    return !input_.units[unit].reshards_after_forward || input_.allow_keep_unsharded || schedule_.unit_returns(unit);
  }
  /// Of the units that a backward pass can leave unsharded.
  bool all_own_gather_slots() const {
    for (std::size_t unit = 0; unit < program_.units.size(); ++unit)
      if (gathers(unit) && program_.units[unit].in_backward && !own_gather_slot(unit)) return false;
    return true;
  }
  bool own_gradient_slot(std::uint32_t unit) const { return waits_in_slot(unit) || schedule_.unit_returns(unit); }
  /// The unit's gradients wait in the slot that backward has written them to.
  bool waits_in_slot(std::uint32_t unit) const {
    return input_.allow_no_sync && input_.reduce_is_master && !program_.units[unit].writes_shards;
  }
  bool waits_in_accumulator(std::uint32_t unit) const { return program_.units[unit].accumulates; }
  /// The use's forward may end with its unit dropped.
  bool may_drop(std::size_t use) const {
    auto const unit = schedule_.unit(use);
    return gathers(unit) && !schedule_.returns(use) && input_.units[unit].reshards_after_forward;
  }
  /// @return whether the unit stays unsharded when this use's forward ends. If no use
  /// in a backward pass follows, a unit is kept until its last use at most
  bool keeps_after_forward(std::size_t use, Phase phase) const {
    bool const in_backward = phase != Phase::evaluation && program_.units[schedule_.unit(use)].in_backward;
    bool const used_again = !schedule_.last_use_of_unit(use);
    if (schedule_.returns(use)) return input_.keep_root && (used_again || in_backward);
    if (used_again) return true;
    if (!in_backward) return false;
    return !may_drop(use) || (input_.keep_last && use == last_that_may_drop());
  }
  /// The unit's gradients are rounded when it is reduced. Those of a unit that no other rank shares travel in buckets.
  bool is_rounded(std::size_t unit) const { return program_.wire && !program_.units[unit].writes_shards; }
  /// Wires that units take in turn.
  std::uint32_t wires_in_turn() const {
    return static_cast<std::uint32_t>(program_.wires.size()) - (program_.bucket_wire != Program::none ? 1 : 0);
  }

  StepInput const& input_;
  Schedule schedule_{0};
  Program program_;
  std::size_t backward_end_ = 0;  ///< the last use of a backward pass
  std::size_t own_gather_slots_ = 0, own_gradient_slots_ = 0;
  std::vector<std::uint32_t> gradient_slots_;  ///< by unit: where backward writes its gradients
  std::vector<std::int64_t> gradient_ends_;    ///< where each unit of the completion order ends, in elements

 private:
  [[gnu::cold]] void describe_units() {
    auto& p = program_;
    p.param_bytes = input_.param_bytes;
    p.gradient_bytes = input_.reduce_bytes;
    for (std::size_t use = 0; use < schedule_.size(); ++use)
      p.modules.push_back(input_.modules.empty() ? std::to_string(use) : input_.modules[use]);
    p.units = FixedArray<Program::Unit>(input_.units.size());
    for (std::size_t u = 0; u < p.units.size(); ++u) {
      auto const& declared = input_.units[u];
      auto& unit = p.units[u];
      unit.name = declared.name.empty() ? std::to_string(u) : declared.name;
      unit.elements = declared.elements;
      unit.sets_gradients = declared.sets_gradients;
      unit.frozen = declared.frozen;
      unit.shards = declared.shards ? input_.shards : 1;
      unit.replicas = input_.shards * input_.replicas / unit.shards;
      unit.reads_masters = unit.empty() || (unit.shards == 1 && input_.param_is_master);
      unit.writes_shards = !unit.trains() || (unit.shards == 1 && input_.reduce_is_master);
      unit.waits_for_replicas =
          declared.shards && unit.replicas > 1 && !unit.writes_shards && input_.allow_no_replica_sync;
      unit.accumulates = input_.allow_no_sync && !input_.reduce_is_master && !unit.writes_shards;
      if (unit.accumulates) p.accumulator_elements += unit.elements;
    }
  }

  /// The lowest use of a unit that trains; 0 if no unit below it is frozen. If none trains, backward has no use.
  [[gnu::cold]] void find_backward_end() {
    auto& p = program_;
    bool frozen = false;
    for (; backward_end_ < schedule_.size(); ++backward_end_) {
      auto const& unit = p.units[schedule_.unit(backward_end_)];
      if (unit.trains()) break;
      frozen = frozen || unit.frozen;
    }
    if (!frozen) backward_end_ = 0;
    for (auto& unit : p.units) unit.in_backward = false;
    for (auto use = backward_end_; use < schedule_.size(); ++use) p.units[schedule_.unit(use)].in_backward = true;
    for (std::size_t u = 0; u < p.units.size(); ++u)
      if (p.units[u].frozen && p.units[u].in_backward && !input_.units[u].skips_gradients)
        p.scratch_elements = std::max(p.scratch_elements, p.units[u].elements);
  }

  [[gnu::cold]] void order_completion() {
    std::vector<std::size_t> reduced_from_slots;
    std::vector<std::int64_t> elements;
    std::int64_t end = 0;
    for (auto use = schedule_.size(); use-- > 0;) {
      if (!schedule_.first_use_of_unit(use)) continue;
      auto const unit = schedule_.unit(use);
      if (!program_.units[unit].trains()) continue;
      auto const direct = program_.units[unit].writes_shards;
      (direct ? program_.gradient_order : reduced_from_slots).push_back(unit);
      if (!direct) continue;
      elements.push_back(program_.units[unit].elements);
      gradient_ends_.push_back(end += elements.back());
    }
    if (input_.shards * input_.replicas > 1)
      program_.buckets = make_buckets(gradient_ends_, sizeof(float), input_.bucket_bytes, input_.first_bucket_bytes);
    program_.buffers = {program_.units.size(), elements, program_.gradient_order, reduced_from_slots, program_.buckets};
    for (auto const unit : reduced_from_slots) program_.gradient_order.push_back(unit);
  }

  [[gnu::cold]] void give_wires() {
    auto& p = program_;
    p.reduce_bytes = input_.wire ? size_of(*input_.wire) : input_.reduce_bytes;
    p.wire = input_.wire;
    if (!input_.wire) return;
    std::int64_t largest = 0, largest_bucket = 0;
    std::size_t rounded = 0;
    bool replicated = false;
    for (std::size_t u = 0; u < p.units.size(); ++u) {
      if (!is_rounded(u)) continue;
      auto const& unit = p.units[u];
      largest = std::max(largest, unit.elements);
      replicated = replicated || (unit.replicas > 1 && !unit.waits_for_replicas);
      ++rounded;
    }
    for (std::size_t wire = 0; wire < std::min<std::size_t>(rounded, replicated ? 2 : 1); ++wire)
      add(p.wires, {largest});
    for (auto const& bucket : p.buckets) largest_bucket = std::max(largest_bucket, bucket.size());
    if (largest_bucket == 0) return;
    p.bucket_wire = add(p.wires, {largest_bucket});
  }

  static std::uint32_t add(std::vector<BufferPlan>& slots, BufferPlan slot) {
    slots.push_back(slot);
    return static_cast<std::uint32_t>(slots.size() - 1);
  }
  [[gnu::cold]] void give_own_slots() {
    auto& p = program_;
    for (std::uint32_t u = 0; u < p.units.size(); ++u) {
      auto& unit = p.units[u];
      if (gathers(u) && own_gather_slot(u)) unit.gather_slot = add(p.gather_slots, {unit.elements, u});
      if (!unit.writes_shards && own_gradient_slot(u)) unit.gradient_slot = add(p.gradient_slots, {unit.elements, u});
    }
    for (std::size_t use = 0; use < schedule_.size(); ++use) {
      if (!keeps_slice(use)) continue;
      auto const u = static_cast<std::uint32_t>(schedule_.unit(use));
      p.units[u].kept_slot = add(p.kept_slots, {p.units[u].elements / input_.reshard_ranks, u});
    }
    own_gather_slots_ = p.gather_slots.size();
    own_gradient_slots_ = p.gradient_slots.size();
  }
  /// Units take the shared slots in turn, in the order of backward. A slot is zeroed if one of its units adds to
  /// zeroes.
  [[gnu::cold]] void lease_gradient_slots() {
    auto& p = program_;
    gradient_slots_ = std::vector<std::uint32_t>(p.units.size(), Program::none);
    std::size_t leases = 0;
    for (auto use = schedule_.size(); use-- > 0;) {
      auto const u = schedule_.unit(use);
      auto const& unit = p.units[u];
      if (!schedule_.last_use_of_unit(use) || unit.writes_shards) continue;
      auto& slot = gradient_slots_[u] = unit.gradient_slot;
      if (slot == Program::none)
        slot = static_cast<std::uint32_t>(own_gradient_slots_ +
                                          leases++ % (p.gradient_slots.size() - own_gradient_slots_));
      p.gradient_slots[slot].zeroed = p.gradient_slots[slot].zeroed || !unit.sets_gradients;
    }
  }

  std::size_t last_that_may_drop() const {
    for (auto use = schedule_.size(); use-- > 0;)
      if (may_drop(use) && program_.units[schedule_.unit(use)].in_backward) return use;
    return schedule_.size();
  }
  bool keeps_slice(std::size_t use) const {
    auto const unit = schedule_.unit(use);
    return input_.reshard_ranks > 0 && input_.units[unit].shards && program_.units[unit].in_backward && may_drop(use) &&
           !keeps_after_forward(use, Phase::forward);
  }
};

}  // namespace detail
}  // namespace fsdp
