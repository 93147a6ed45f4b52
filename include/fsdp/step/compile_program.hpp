// SPDX-License-Identifier: Apache-2.0
// Writes the program of a step: the one place that decides what is gathered when, what stays, and in which buffer.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/error.hpp"
#include "fsdp/step/buckets.hpp"
#include "fsdp/step/program.hpp"
#include "fsdp/step/schedule.hpp"
#include "fsdp/step/step_input.hpp"
#include "fsdp/step/unsharded_units.hpp"
#include "fsdp/step/wires.hpp"

namespace fsdp {

namespace detail {

class ProgramCompiler {
 public:
  [[gnu::cold]] explicit ProgramCompiler(StepInput const& input) : input_(input) {
    for (std::size_t unit = 0; input.uses.empty() && unit < input.units.size(); ++unit) schedule_.declare(unit, "");
    for (auto const unit : input.uses) schedule_.declare(unit, "");
    ahead_ = input.prefetch.forward.empty() ? prefetch_by_depth(schedule_, 1, 1, empty_units(input)) : input.prefetch;
  }

  [[gnu::cold]] Program compile() {
    describe_units();
    order_completion();
    give_wires(program_, input_);
    give_own_slots();
    // With a slot for every unit, as many are in use at a time as are needed.
    auto const needed = walk(program_.units.size());
    give_shared_slots(needed);
    walk(needed);
    return std::move(program_);
  }

 private:
  using Turn = Program::Turn;

  [[gnu::cold]] void describe_units() {
    auto& p = program_;
    for (std::size_t use = 0; use < schedule_.size(); ++use)
      p.modules.push_back(input_.modules.empty() ? std::to_string(use) : input_.modules[use]);
    for (auto const& declared : input_.units) {
      auto& unit = p.units.emplace_back();
      unit.name = declared.name.empty() ? std::to_string(p.units.size() - 1) : declared.name;
      unit.elements = declared.elements;
      unit.shards = declared.shards ? input_.shards : 1;
      unit.replicas = input_.shards * input_.replicas / unit.shards;
      unit.reads_masters = unit.empty() || (unit.shards == 1 && input_.param_is_master);
      unit.writes_shards = unit.empty() || (unit.shards == 1 && input_.reduce_is_master);
      unit.waits_for_replicas = declared.shards && unit.replicas > 1 && !unit.writes_shards && input_.no_replica_sync;
      if (waits_in_accumulator(static_cast<std::uint32_t>(p.units.size() - 1))) p.accumulator_elements += unit.elements;
    }
  }

  [[gnu::cold]] void order_completion() {
    std::vector<std::size_t> reduced_from_slots;
    std::int64_t end = 0;
    for (auto use = schedule_.size(); use-- > 0;) {
      if (!schedule_.first_use_of_unit(use)) continue;
      auto const unit = schedule_.unit(use);
      if (program_.units[unit].empty()) continue;
      auto const direct = program_.units[unit].writes_shards;
      (direct ? program_.gradient_order : reduced_from_slots).push_back(unit);
      if (direct) gradient_ends_.push_back(end += program_.units[unit].elements);
    }
    if (input_.shards * input_.replicas > 1)
      program_.buckets = make_buckets(gradient_ends_, sizeof(float), input_.bucket_bytes, input_.first_bucket_bytes);
    for (auto const unit : reduced_from_slots) program_.gradient_order.push_back(unit);
  }

  bool gathers(std::size_t unit) const { return !program_.units[unit].reads_masters; }
  bool own_gather_slot(std::size_t unit) const {
    return !input_.units[unit].reshards_after_forward || input_.keep_unsharded || schedule_.unit_returns(unit);
  }
  bool own_gradient_slot(std::uint32_t unit) const { return waits_in_slot(unit) || schedule_.unit_returns(unit); }
  /// The use's forward may end with its unit dropped.
  bool may_drop(std::size_t use) const {
    auto const unit = schedule_.unit(use);
    return gathers(unit) && !schedule_.returns(use) && input_.units[unit].reshards_after_forward;
  }
  std::size_t last_that_may_drop() const {
    for (auto use = schedule_.size(); use-- > 0;)
      if (may_drop(use)) return use;
    return schedule_.size();
  }
  /// Whether the unit stays unsharded when this use's forward ends. In evaluation no backward follows: a unit is kept
  /// until its last use at most.
  bool keeps_after_forward(std::size_t use, Phase phase) const {
    bool const evaluating = phase == Phase::evaluation;
    bool const used_again = !schedule_.last_use_of_unit(use);
    if (schedule_.returns(use)) return input_.keep_root && (used_again || !evaluating);
    if (used_again) return true;
    if (evaluating) return false;
    return !may_drop(use) || (input_.keep_last && use == last_that_may_drop());
  }
  bool keeps_slice(std::size_t use) const {
    return input_.reshard_ranks > 0 && input_.units[schedule_.unit(use)].shards && may_drop(use) &&
           !keeps_after_forward(use, Phase::forward);
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
  [[gnu::cold]] void give_shared_slots(std::size_t in_turn) {
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
  }

  /// Writes all passes, where `in_turn` slots are shared. @return how many of them are in use at a time
  [[gnu::cold]] std::size_t walk(std::size_t in_turn) {
    UnshardedUnits units(program_, own_gather_slots_, in_turn), evaluated = units, resident = units;
    units.restart(false);
    auto forward = walk_forward(units, Phase::forward, true);
    // Parameters that an earlier pass has left make gathers needless, and change nothing else.
    if (all_own_gather_slots() && program_.kept_slots.empty()) {
      resident.restart(true);
      auto const fewer = walk_forward(resident, Phase::forward, false);
      for (std::size_t turn = 0; turn < forward.size(); ++turn)
        restrict_to_sharded(forward[turn].before, fewer[turn].before);
    }
    program_.turns(Phase::forward) = std::move(forward);
    program_.turns(Phase::backward) = walk_backward(units);
    evaluated.restart(false);
    program_.turns(Phase::evaluation) = walk_forward(evaluated, Phase::evaluation, false);
    return std::max(units.most_in_turn(), evaluated.most_in_turn());
  }
  bool all_own_gather_slots() const {
    for (std::size_t unit = 0; unit < program_.units.size(); ++unit)
      if (gathers(unit) && !own_gather_slot(unit)) return false;
    return true;
  }
  /// Operations that are not in `fewer`, which has the others in the same order, need sharded parameters at first.
  [[gnu::cold]] static void restrict_to_sharded(std::vector<Operation>& all, std::vector<Operation> const& fewer) {
    auto next = fewer.begin();
    for (auto& operation : all) {
      if (next != fewer.end() && *next == operation) {
        ++next;
      } else {
        operation.when = only(starts_sharded);
      }
    }
    FSDP_EXPECTS(
        next == fewer.end(),
        "the program of a pass over unsharded parameters has an operation that the program of sharded ones lacks");
  }

  [[gnu::cold]] std::vector<Turn> walk_forward(UnshardedUnits& units, Phase phase, bool cut) {
    std::vector<Turn> turns;
    for (std::size_t use = 0; use < schedule_.size(); ++use) {
      auto turn = begin(use, units, ahead_.forward[use], cut);
      if (gathers(turn.unit) && !keeps_after_forward(use, phase)) {
        auto const slice = program_.units[turn.unit].kept_slot;
        if (phase == Phase::forward && slice != Operation::no_slot)
          turn.after.push_back({Action::keep_slice, turn.unit, slice});
        turn.after.push_back({Action::drop, turn.unit, units[turn.unit].slot});
        units.drop(turn.unit);
      }
      turns.push_back(std::move(turn));
    }
    return turns;
  }

  [[gnu::cold]] std::vector<Turn> walk_backward(UnshardedUnits& units) {
    std::vector<Turn> turns;
    std::size_t leases = 0;  // of shared slots
    std::uint32_t rounded = 0;
    std::vector<std::size_t> lessees(program_.gradient_slots.size());
    Completion completion;
    for (auto use = schedule_.size(); use-- > 0;) {
      auto turn = begin(use, units, ahead_.backward[use], true, true);
      bool const empty = program_.units[turn.unit].empty();
      if (schedule_.last_use_of_unit(use) && !empty) {
        auto const slot = slot_to_lease(turn.unit, leases);
        turn.before.push_back({Action::lease, turn.unit, slot,
                               waits_in_slot(turn.unit) ? only(waiting_answers & ~held(turn.unit)) : any_facts});
        if (slot != Operation::no_slot) lessees[slot] = turn.unit;
      }
      if (schedule_.first_use_of_unit(use) && !empty) {
        if (gathers(turn.unit)) turn.after.push_back({Action::drop, turn.unit, units[turn.unit].slot, only(drops)});
        if (auto const slice = program_.units[turn.unit].kept_slot; slice != Operation::no_slot)
          turn.after.push_back({Action::drop_slice, turn.unit, slice, only(drops)});
        units.drop(turn.unit);
        if (program_.units[turn.unit].writes_shards) {
          end_direct_gradients(turn, completion);
        } else {
          end_gradients(turn, wire_of(program_, turn.unit, rounded));
        }
      }
      turns.push_back(std::move(turn));
    }
    if (!turns.empty()) settle(turns.back(), lessees);  // before modules are declared, there are none
    return turns;
  }
  /// The unit's gradients wait in the slot that backward has written them to.
  bool waits_in_slot(std::uint32_t unit) const {
    return input_.no_sync && input_.reduce_is_master && !program_.units[unit].writes_shards;
  }
  bool waits_in_accumulator(std::uint32_t unit) const {
    return input_.no_sync && !input_.reduce_is_master && !program_.units[unit].writes_shards;
  }
  /// A micro-step that does not sum over replicas reduces the unit all the same: it has none, or shards to sum within.
  bool reduces_in_group(std::uint32_t unit) const {
    return input_.units[unit].shards || program_.units[unit].replicas == 1;
  }
  /// The unit's gradients wait on their rank: if it is reduced over replicas alone, also where sums wait for those.
  Facts held(std::uint32_t unit) const { return reduces_in_group(unit) ? gradients_wait : gradients_wait | sums_wait; }
  /// Micro-steps that end with the unit's gradients reduced, at least within its shard group.
  Facts reducing(std::uint32_t unit) const { return reduces_in_group(unit) ? syncs_group | syncs_all : syncs_all; }
  [[gnu::cold]] void settle(Turn& last, std::vector<std::size_t> const& lessees) const {
    for (std::uint32_t slot = 0; slot < lessees.size(); ++slot) {
      auto const unit = static_cast<std::uint32_t>(lessees[slot]);
      last.after.push_back({Action::settle, unit, slot, waits_in_slot(unit) ? only(reducing(unit)) : any_facts});
    }
    for (std::uint32_t unit = 0; unit < program_.units.size(); ++unit)
      if (waits_in_accumulator(unit))
        last.after.push_back({Action::settle, unit, Operation::no_slot, only(reducing(unit) | held(unit))});
    for (std::uint32_t wire = 0; wire < program_.wires.size(); ++wire)
      last.after.push_back({Action::settle_wire, last.unit, wire});
  }
  std::uint32_t slot_to_lease(std::uint32_t unit, std::size_t& leases) const {
    auto const& p = program_;
    if (p.units[unit].writes_shards || p.units[unit].gradient_slot != Operation::no_slot)
      return p.units[unit].gradient_slot;
    auto const in_turn = p.gradient_slots.size() - own_gradient_slots_;
    if (in_turn == 0) return Operation::no_slot;  // they are not given out yet
    return static_cast<std::uint32_t>(own_gradient_slots_ + leases++ % in_turn);
  }
  /// Backward has written all of a unit's gradients.
  [[gnu::cold]] void end_gradients(Turn& turn, std::uint32_t wire) const {
    bool const partial = program_.units[turn.unit].waits_for_replicas;
    auto const reduces = reducing(turn.unit);
    if (waits_in_accumulator(turn.unit)) {
      add_when(turn, Action::hold, only(sync_answers & ~reduces));
      add_when(turn, Action::add_held, only(reduces | held(turn.unit)));
    }
    if (partial) add_when(turn, Action::reduce_group, only(syncs_group), wire);
    add_when(turn, Action::reduce, only(partial ? syncs_all : reduces), wire);
  }
  /// How far a backward pass that writes gradient shards has come, in completion order.
  struct Completion {
    std::size_t written = 0;   ///< units
    std::size_t reduced = 0;   ///< units whose last bucket is under way
    std::uint32_t bucket = 0;  ///< the next to be all-reduced
  };
  /// The same where it has written the gradient shard: buckets that are complete are all-reduced.
  [[gnu::cold]] void end_direct_gradients(Turn& turn, Completion& at) const {
    auto const& p = program_;
    bool const alone = p.units[turn.unit].replicas == 1;
    add_when(turn, Action::end_gradients, only(alone ? syncs_group | syncs_all : syncs_all));
    auto const end = gradient_ends_[at.written++];
    bool awaited = false;
    for (; at.bucket < p.buckets.size() && p.buckets[at.bucket].end <= end; ++at.bucket) {
      if (!std::exchange(awaited, true)) add_when(turn, Action::await_gradients, only(syncs_all));
      turn.after.push_back({Action::all_reduce, turn.unit, at.bucket, only(syncs_all)});
    }
    auto const reduced_end = at.bucket == 0 ? 0 : p.buckets[at.bucket - 1].end;
    for (; at.reduced < at.written && gradient_ends_[at.reduced] <= reduced_end; ++at.reduced)
      turn.after.push_back({Action::complete, static_cast<std::uint32_t>(p.gradient_order[at.reduced]),
                            Operation::no_slot, only(syncs_all)});
  }
  static void add_when(Turn& turn, Action action, Facts when, std::uint32_t slot = Operation::no_slot) {
    turn.after.push_back({action, turn.unit, slot, when});
  }

  /// A use begins: its unit is gathered, then those of `ahead`, which is cut where too much waits for its use.
  [[gnu::cold]] Turn begin(std::size_t use, UnshardedUnits& units, std::vector<std::size_t>& ahead, bool cut,
                           bool in_backward = false) {
    Turn turn{static_cast<std::uint32_t>(use), static_cast<std::uint32_t>(schedule_.unit(use)), {}, {}};
    auto const gather = [&](std::size_t unit) {
      units.gather(unit);
      bool const sliced = in_backward && program_.units[unit].kept_slot != Operation::no_slot;
      turn.before.push_back(
          {sliced ? Action::gather_slices : Action::gather, static_cast<std::uint32_t>(unit), units[unit].slot});
    };
    if (gathers(turn.unit) && !units[turn.unit].unsharded) gather(turn.unit);
    units[turn.unit].ahead = false;
    std::size_t taken = 0;
    for (; taken < ahead.size(); ++taken) {
      auto const next = schedule_.unit(ahead[taken]);
      if (!gathers(next) || units[next].unsharded) continue;
      if (cut && exceeds_cap(units, next)) break;
      gather(next);
      units[next].ahead = true;
    }
    if (cut) ahead.resize(taken);
    if (gathers(turn.unit) && !std::exchange(units[turn.unit].awaited, true))
      turn.before.push_back({Action::await, turn.unit});
    return turn;
  }
  /// Whether gathering `next` as well is more than may wait for its use.
  bool exceeds_cap(UnshardedUnits& units, std::size_t next) const {
    if (input_.max_ahead_bytes == 0) return false;
    auto elements = program_.units[next].elements;
    for (std::size_t u = 0; u < program_.units.size(); ++u)
      if (units[u].ahead) elements += program_.units[u].elements;
    return elements > input_.max_ahead_bytes / static_cast<std::int64_t>(input_.param_bytes);
  }
  StepInput const& input_;
  Schedule schedule_{0};
  PrefetchLists ahead_;
  Program program_;
  std::size_t own_gather_slots_ = 0, own_gradient_slots_ = 0;
  std::vector<std::int64_t> gradient_ends_;  ///< where each unit of the completion order ends, in elements
};

}  // namespace detail

/// Compiles the step that runs as declared.
inline Program compile_program(StepInput const& input) { return detail::ProgramCompiler(input).compile(); }

}  // namespace fsdp
