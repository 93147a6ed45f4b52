// SPDX-License-Identifier: Apache-2.0
// Decides the buffers of a step: their sizes, the units that use them, and the units that stay unsharded after forward.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/algorithm.hpp"
#include "fsdp/layout.hpp"
#include "fsdp/step/buckets.hpp"
#include "fsdp/step/path_plan.hpp"
#include "fsdp/step/program.hpp"
#include "fsdp/step/step_input.hpp"
#include "fsdp/step/unit_planner.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

namespace detail {

/// Assigns buffers to units.
///
/// [Note: Units of a module] A module's tensors of several kinds lie in several units, which are gathered and dropped
/// together. Units that take turns in shared slots are of one *rank of size*: the largest unit of each module takes
/// turns with the largest of others, the second largest with the second largest. So slots for all of a module's units
/// are hardly larger than the largest module.
///
/// [Note: Wires] If ranks sum in a narrower type than backward writes, gradients are rounded into a send buffer
/// (*wire*), and the wire is reduced. The slot is free after rounding. The reduce stream reduces one unit after
/// another, so one wire is enough for all units. With replicas there are two wires: one unit is reduce-scattered while
/// the unit before it is all-reduced. Buckets are rounded on the replicate stream, into a wire of their own.
class BufferPlanner : protected UnitPlanner {
 protected:
  using UnitPlanner::UnitPlanner;

  /// Plans all but the slots that units share.
  [[gnu::cold]] void plan_units() {
    describe();
    order_completion();
    give_wires();
    give_own_slots();
  }
  /// @param in_turn  number of shared slots of parameters, by rank of size
  [[gnu::cold]] void share_slots(std::vector<std::size_t> const& in_turn) {
    auto& p = program_;
    for (std::uint32_t rank = 0; rank < in_turn.size(); ++rank)
      for (std::size_t slot = 0; slot < in_turn[rank]; ++slot) add(p.gather_slots, {gather_ranks_.largest[rank]});
    // Two slots: one is filled while the other is reduced.
    first_gradient_slots_.clear();
    for (std::uint32_t rank = 0; rank < gradient_ranks_.largest.size(); ++rank) {
      first_gradient_slots_.push_back(static_cast<std::uint32_t>(p.gradient_slots.size()));
      for (std::size_t slot = 0; slot < std::min<std::size_t>(gradient_ranks_.units[rank], 2); ++slot)
        add(p.gradient_slots, {gradient_ranks_.largest[rank]});
    }
    for_each_path([this] { lease_gradient_slots(); });
    p.buffers.set_slots(step::Pool::gather, p.gather_slots.size());
    p.buffers.set_slots(step::Pool::kept, p.kept_slots.size());
    p.buffers.set_slots(step::Pool::gradient_slot, p.gradient_slots.size());
    p.buffers.set_slots(step::Pool::wire, p.wires.size());
  }

  bool own_gather_slot(std::size_t unit) const {
    return !input_.units[unit].reshards_after_forward || input_.allow_keep_unsharded || returns_in_some_path(unit);
  }
  bool returns_in_some_path(std::size_t unit) const {
    for (auto const& path : paths_)
      if (path.order.unit_returns(first_unit(unit))) return true;
    return false;
  }
  /// Whether every unit that a backward pass can leave unsharded has a slot of its own.
  bool all_own_gather_slots() const {
    for (std::size_t unit = 0; unit < program_.units.size(); ++unit)
      if (gathers(unit) && in_backward(unit) && !own_gather_slot(unit)) return false;
    return true;
  }
  bool own_gradient_slot(std::uint32_t unit) const { return waits_in_slot(unit) || returns_in_some_path(unit); }
  /// Whether the unit's gradients wait in the slot that backward has written.
  bool waits_in_slot(std::uint32_t unit) const {
    return input_.allow_no_sync && writes_fp32(unit) && !program_.units[unit].writes_shards;
  }
  bool waits_in_accumulator(std::uint32_t unit) const { return program_.units[unit].accumulates; }
  /// Whether the unit, one of the use's, may be resharded when the use's forward ends.
  bool may_drop(std::size_t use, std::size_t unit) const {
    return gathers(unit) && !order().returns(use) && input_.units[unit].reshards_after_forward;
  }
  /// Whether the unit, one of the use's, stays unsharded when this use's forward ends. If no use in a backward pass
  /// follows, a unit is kept until its last use at most
  bool keeps_after_forward(std::size_t use, std::size_t unit, Phase phase) const {
    bool const in_backward = phase != Phase::evaluation && this->in_backward(unit);
    bool const used_again = !order().last_use_of_unit(use);
    if (order().returns(use)) return input_.keep_root && (used_again || in_backward);
    if (used_again) return true;
    if (!in_backward) return false;
    return !may_drop(use, unit) || (input_.keep_last && use == last_that_may_drop());
  }
  /// Whether this is the last use of its units in a backward pass that ends with the use `end`.
  bool is_last_in_backward(std::size_t use, std::size_t end) const {
    auto const earlier = order().previous_use(use);
    return earlier == UseOrder::none || earlier < end;
  }
  /// Whether the unit's gradients are rounded when it is reduced. Those of a unit that no other rank shares travel in
  /// buckets.
  bool is_rounded(std::size_t unit) const {
    auto const& planned = program_.units[unit];
    return program_.wire && !planned.writes_shards && planned.world() > 1;
  }
  /// Ranks of size among a module's units that take turns.
  struct Ranks {
    std::vector<std::uint32_t> of_unit;  ///< by unit; Program::none: it takes no turns
    std::vector<std::int64_t> largest;   ///< by rank: bytes of a slot
    std::vector<std::size_t> units;      ///< by rank: number of units
  };
  /// Wires that units take in turn.
  std::uint32_t wires_in_turn() const {
    return static_cast<std::uint32_t>(program_.wires.size()) - (program_.bucket_wire != Program::none ? 1 : 0);
  }

  std::size_t own_gather_slots_ = 0;
  Ranks gather_ranks_, gradient_ranks_;
  std::vector<std::uint32_t> first_gradient_slots_;  ///< by rank of size: the first of its shared slots
  std::vector<std::int64_t> gradient_ends_;          ///< end of each unit in the completion order, in elements

 private:
  [[gnu::cold]] void order_completion() {
    std::vector<std::size_t> reduced_from_slots;
    std::vector<std::int64_t> elements;
    std::int64_t end = 0;
    auto const last = order().backward_end();
    for (auto use = order().size(); use-- > last;) {
      if (!is_last_in_backward(use, last)) continue;
      for (auto const unit : units_of(use)) {
        if (!program_.units[unit].trains()) continue;
        auto const direct = program_.units[unit].writes_shards;
        (direct ? program_.gradient_order : reduced_from_slots).push_back(unit);
        if (!direct) continue;
        elements.push_back(program_.units[unit].elements);
        gradient_ends_.push_back(end += elements.back());
      }
    }
    if (input_.shards * input_.replicas > 1)
      program_.buckets = make_buckets(gradient_ends_, sizeof(float), input_.bucket_bytes, input_.first_bucket_bytes);
    program_.buffers = {program_.units.size(), elements, program_.gradient_order, reduced_from_slots, program_.buckets};
    auto const declared = program_.buckets.size();
    for (auto& path : paths_)
      add_path_buckets(path, program_.buckets, declared, gradient_ends_, program_.gradient_order);
    for (auto const unit : reduced_from_slots) program_.gradient_order.push_back(unit);
  }

  [[gnu::cold]] void give_wires() {
    auto& p = program_;
    p.wire = input_.wire;
    if (!input_.wire) return;
    auto const element = size_of(*input_.wire);
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
      add(p.wires, {slot_bytes(largest, element)});
    for (auto const& bucket : p.buckets) largest_bucket = std::max(largest_bucket, bucket.size());
    if (largest_bucket == 0) return;
    p.bucket_wire = add(p.wires, {slot_bytes(largest_bucket, element)});
  }

  static std::uint32_t add(std::vector<BufferPlan>& slots, BufferPlan slot) {
    slots.push_back(slot);
    return static_cast<std::uint32_t>(slots.size() - 1);
  }
  [[gnu::cold]] void give_own_slots() {
    auto& p = program_;
    for (std::uint32_t u = 0; u < p.units.size(); ++u) {
      auto& unit = p.units[u];
      if (gathers(u) && own_gather_slot(u))
        unit.gather_slot = add(p.gather_slots, {parameter_slot(u, unit.elements), u});
      if (!unit.writes_shards && own_gradient_slot(u))
        unit.gradient_slot = add(p.gradient_slots, {gradient_slot_bytes(u), u});
    }
    p.kept_ranks = input_.reshard_ranks;
    for_each_path([this] {
      for (std::size_t use = 0; use < order().size(); ++use)
        for (auto const u : units_of(use)) give_kept_slot(use, u);
    });
    own_gather_slots_ = p.gather_slots.size();
    std::vector<std::int64_t> parameters(p.units.size()), gradients(p.units.size());
    for (std::uint32_t u = 0; u < p.units.size(); ++u) {
      if (gathers(u) && !own_gather_slot(u)) parameters[u] = parameter_slot(u, p.units[u].elements);
      if (!p.units[u].writes_shards && !own_gradient_slot(u)) gradients[u] = gradient_slot_bytes(u);
    }
    gather_ranks_ = ranks_of_size(parameters);
    gradient_ranks_ = ranks_of_size(gradients);
  }
  [[gnu::cold]] void give_kept_slot(std::size_t use, std::uint32_t u) {
    auto& unit = program_.units[u];
    if (!keeps_slice(use, u)) return;
    path_->keeps_slice[u] = true;
    if (unit.kept_slot == Program::none)
      unit.kept_slot = add(program_.kept_slots, {parameter_slot(u, unit.elements / program_.kept_ranks), u});
  }
  std::int64_t parameter_slot(std::uint32_t u, std::int64_t elements) const {
    return slot_bytes(elements, size_of(program_.units[u].types.parameter));
  }
  std::int64_t gradient_slot_bytes(std::uint32_t u) const {
    return slot_bytes(program_.units[u].elements, size_of(program_.units[u].types.gradient));
  }
  /// Ranks units by size: see [Note: Units of a module]. @param bytes  by unit: of its content; 0: it takes no turns
  [[gnu::cold]] Ranks ranks_of_size(std::vector<std::int64_t> const& bytes) const {
    Ranks ranks;
    ranks.of_unit = std::vector<std::uint32_t>(bytes.size(), Program::none);
    for (std::uint32_t u = 0; u < bytes.size(); ++u) {
      if (bytes[u] == 0) continue;
      std::uint32_t rank = 0;  // units of its module that are larger, or as large and come before it
      for (auto const other : beside(first_unit(u)))
        if (bytes[other] > bytes[u] || (bytes[other] == bytes[u] && other < u)) ++rank;
      ranks.of_unit[u] = rank;
      while (ranks.largest.size() <= rank) ranks.largest.push_back(0), ranks.units.push_back(0);
      ranks.largest[rank] = std::max(ranks.largest[rank], bytes[u]);
      ++ranks.units[rank];
    }
    return ranks;
  }
  /// Assigns the shared slots to units in turn, in the order of backward. A slot is zeroed if one of its units adds to
  /// zeroes.
  [[gnu::cold]] void lease_gradient_slots() {
    auto& p = program_;
    path_->gradient_slots = std::vector<std::uint32_t>(p.units.size(), Program::none);
    std::vector<std::uint32_t> leases(first_gradient_slots_.size(), 0);
    for (auto use = order().size(); use-- > 0;) {
      if (!order().last_use_of_unit(use)) continue;
      for (auto const u : units_of(use)) {
        auto const& unit = p.units[u];
        if (unit.writes_shards) continue;
        auto& slot = path_->gradient_slots[u] = unit.gradient_slot;
        if (slot == Program::none) {
          auto const rank = gradient_ranks_.of_unit[u];
          auto const in_turn = static_cast<std::uint32_t>(std::min<std::size_t>(gradient_ranks_.units[rank], 2));
          slot = first_gradient_slots_[rank] + leases[rank]++ % in_turn;
        }
        p.gradient_slots[slot].zeroed = p.gradient_slots[slot].zeroed || !path_->sets_gradients[u];
      }
    }
  }

  std::size_t last_that_may_drop() const {
    for (auto use = order().size(); use-- > 0;)
      for (auto const u : units_of(use))
        if (may_drop(use, u) && in_backward(u)) return use;
    return order().size();
  }
  bool keeps_slice(std::size_t use, std::size_t unit) const {
    return input_.reshard_ranks > 0 && input_.units[unit].shards && in_backward(unit) && may_drop(use, unit) &&
           !keeps_after_forward(use, unit, Phase::forward);
  }
};

}  // namespace detail
}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
