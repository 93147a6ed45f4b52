// SPDX-License-Identifier: Apache-2.0
// Writes the program of a step: decides when each unit is gathered and dropped, and which shared slot it gets.
// buffer_planner.hpp decides which units stay unsharded and which buffers exist; operation_writer.hpp writes
// reductions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "fsdp/algorithm.hpp"
#include "fsdp/error.hpp"
#include "fsdp/step/plan_events.hpp"
#include "fsdp/step/program.hpp"
#include "fsdp/step/step_input.hpp"
#include "fsdp/step/update_writer.hpp"
#include "fsdp/step/use_order.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

namespace detail {

/// State of units while the compiler walks through the uses: the unsharded units, and the slot of each.
class UnshardedUnits {
 public:
  /// @param in_backward  by unit: a backward pass of the path comes to it
  /// @param rank_of  by unit: its rank of size; see [Note: Units of a module]
  /// @param in_turn  number of shared slots by rank of size, for units without a slot of their own. They are the last
  ///                 slots, in order of rank
  UnshardedUnits(Program const& program, FixedArray<bool> const& in_backward, std::vector<std::uint32_t> const& rank_of,
                 std::size_t own_slots, std::vector<std::size_t> const& in_turn)
      : program_(&program),
        in_backward_(&in_backward),
        rank_of_(&rank_of),
        slots_(program.units.size(), Program::none),
        ahead_(program.units.size()),
        own_slots_(own_slots),
        in_turn_(&in_turn),
        position_(in_turn.size()),
        used_(in_turn.size()),
        most_(in_turn.size()) {
    auto slots = own_slots;
    for (auto const shared : in_turn) slots += shared;
    busy_ = std::vector<std::uint32_t>(slots);
  }

  /// The slot of a unit's parameters; none: the unit is sharded, or reads masters.
  std::uint32_t slot(std::size_t unit) const { return slots_[unit]; }
  bool is_unsharded(std::size_t unit) const { return slots_[unit] != Program::none; }
  /// Whether the unit was gathered ahead, and its use has not begun.
  bool is_ahead(std::size_t unit) const { return ahead_[unit] != 0; }
  void set_ahead(std::size_t unit, bool ahead) {
    if (is_ahead(unit) == ahead) return;
    auto const& its = program_->units[unit];
    ahead_bytes_ += ahead ? its.param_bytes(its.elements) : -its.param_bytes(its.elements);
    ahead_[unit] = ahead ? 1 : 0;
  }
  /// Bytes of the full parameters of all units that are gathered ahead.
  std::int64_t ahead_bytes() const { return ahead_bytes_; }
  /// Raises each element of `most` to the largest number of shared slots of this rank that were in use at a time.
  void raise(std::vector<std::size_t>& most) const {
    for (std::size_t rank = 0; rank < most.size(); ++rank) most[rank] = std::max(most[rank], most_[rank]);
  }

  /// Begins a forward pass.
  void restart(bool unsharded) {
    for (std::size_t unit = 0; unit < slots_.size(); ++unit) {
      drop(unit);
      if (unsharded && !program_->units[unit].reads_masters && (*in_backward_)[unit]) gather(unit);
    }
  }
  void gather(std::size_t unit) {
    auto const own = program_->units[unit].gather_slot;
    slots_[unit] = own == Program::none ? take((*rank_of_)[unit]) : own;
  }
  void drop(std::size_t unit) {
    if (is_unsharded(unit)) {
      busy_[slots_[unit]] = 0;
      if (program_->units[unit].gather_slot == Program::none) --used_[(*rank_of_)[unit]];
    }
    slots_[unit] = Program::none;
    set_ahead(unit, false);
  }

 private:
  /// Takes the next slot of this rank, or the first free one after it, because prefetch lists may overtake.
  std::uint32_t take(std::uint32_t rank) {
    auto first = own_slots_;
    for (std::uint32_t lower = 0; lower < rank; ++lower) first += (*in_turn_)[lower];
    auto const slots = (*in_turn_)[rank];
    auto& position = position_[rank];
    while (busy_[first + position % slots] != 0) ++position;
    auto const taken = first + position++ % slots;
    busy_[taken] = 1;
    most_[rank] = std::max(most_[rank], ++used_[rank]);
    return static_cast<std::uint32_t>(taken);
  }

  Program const* program_;
  FixedArray<bool> const* in_backward_;
  std::vector<std::uint32_t> const* rank_of_;
  std::vector<std::uint32_t> slots_, ahead_;  ///< by unit
  std::int64_t ahead_bytes_ = 0;
  std::vector<std::uint32_t> busy_;  ///< by slot
  std::size_t own_slots_;
  std::vector<std::size_t> const* in_turn_;          ///< by rank of size: number of shared slots
  std::vector<std::size_t> position_, used_, most_;  ///< by rank: the next slot; slots in use; the most at a time
};

class ProgramCompiler : UpdateWriter {
 public:
  [[gnu::cold]] explicit ProgramCompiler(StepInput const& input) : UpdateWriter(input) {
    for (std::size_t path = 0; path < paths_.size(); ++path) {
      auto& at = paths_[path];
      at.ahead = path == 0 ? input.prefetch : input.paths[path - 1].prefetch;
      if (at.ahead.forward.empty()) at.ahead = prefetch_by_depth(at.order, 1, 1, empty_units(input));
      at.ahead_in_activations = at.ahead;
    }
    program_.set_paths(paths_.size());
    for (std::size_t path = 1; path < paths_.size(); ++path) program_.name_path(path, paths_[path].order.path());
  }

  [[gnu::cold]] Program compile() {
    plan_units();
    place_staged();
    // With a slot for every unit, the walk uses as many at a time as are needed.
    for (auto& path : paths_) path.gradient_slots = std::vector<std::uint32_t>(program_.units.size());
    program_.gradient_slots.push_back({});
    std::vector<std::size_t> enough;
    for (std::size_t rank = 0; rank < gather_ranks_.largest.size(); ++rank) enough.push_back(program_.units.size());
    auto const needed = walk(enough);
    program_.gradient_slots.pop_back();
    share_slots(needed);
    walk(needed);
    for (std::uint32_t u = 0; u < program_.units.size(); ++u) write_updates(u);
    plan_events(program_, input_);
    return std::move(program_);
  }

 private:
  using Turn = Program::Turn;
  /// Writes all passes. @param in_turn  number of shared slots, by rank of size @return the largest numbers of them in
  /// use at a time
  [[gnu::cold]] std::vector<std::size_t> walk(std::vector<std::size_t> const& in_turn) {
    std::vector<std::size_t> most(in_turn.size());
    for_each_path([&] { walk_path(in_turn, most); });
    return most;
  }
  /// Writes the passes of path_. @param most  raised to the numbers of slots that they use
  [[gnu::cold]] void walk_path(std::vector<std::size_t> const& in_turn, std::vector<std::size_t>& most) {
    auto const path = static_cast<std::size_t>(path_ - paths_.begin());
    UnshardedUnits units(program_, path_->in_backward, gather_ranks_.of_unit, own_gather_slots_, in_turn),
        evaluated = units, resident = units;
    units.restart(false);
    auto forward = walk_forward(units, Phase::forward, true);
    // A pass that finds parameters of an earlier pass has fewer gathers. Nothing else changes.
    if (all_own_gather_slots() && program_.kept_slots.empty()) {
      resident.restart(true);
      auto const fewer = walk_forward(resident, Phase::forward, false);
      for (std::size_t turn = 0; turn < forward.size(); ++turn)
        restrict_to_sharded(forward[turn].before, fewer[turn].before);
    }
    program_.turns(Phase::forward, path) = std::move(forward);
    auto activations = units;
    program_.turns(Phase::backward, path) = walk_backward(units, Phase::backward);
    if (input_.allow_frozen_parameters)
      program_.turns(Phase::activations, path) = walk_backward(activations, Phase::activations);
    evaluated.restart(false);
    program_.turns(Phase::evaluation, path) = walk_forward(evaluated, Phase::evaluation, false);
    for (auto const* walked : {&units, &evaluated, &activations}) walked->raise(most);
  }
  /// `fewer` is a subsequence of `all`. Operations that are missing in it run only if the pass starts sharded.
  [[gnu::cold]] static void restrict_to_sharded(Operations& all, Operations const& fewer) {
    auto const same = [](Operation const& a, Operation const& b) {
      return a.primitive == b.primitive && a.unit == b.unit && a.all == b.all;
    };
    auto next = fewer.begin();
    for (auto& operation : all) {
      if (next != fewer.end() && same(*next, operation)) {
        ++next;
      } else {
        operation.when = only(starts_sharded);
      }
    }
    FSDP_EXPECTS(
        next == fewer.end(),
        "the program of a pass over unsharded parameters has an operation that the program of sharded ones lacks");
  }

  [[gnu::cold]] FixedArray<Turn> walk_forward(UnshardedUnits& units, Phase phase, bool cut) {
    FixedArray<Turn> turns(order().size());
    for (std::size_t use = 0; use < order().size(); ++use) {
      auto& turn = turns[use];
      begin(turn, use, units, path_->ahead.forward[use], cut);
      compute(turn, Primitive::forward, units);
      for (auto const u : units_of(use)) {
        if (!gathers(u) || keeps_after_forward(use, u, phase)) continue;
        if (phase == Phase::forward && path_->keeps_slice[u]) keep_slice(turn.after, u, units.slot(u));
        drop(turn.after, u, units);
      }
    }
    return turns;
  }
  [[gnu::cold]] void compute(Turn& turn, Primitive primitive, UnshardedUnits const& units,
                             bool writes_gradients = false) {
    for (auto const u : units_of(turn.place)) {
      auto operation = OperationWriter::compute(primitive, u, units.slot(u), writes_gradients);
      operation.beside = u != turn.unit;
      if (!operation.beside)
        turn.compute = operation;
      else if (operation.size > 0)
        turn.beside.push_back(std::move(operation));
    }
  }

  /// @param phase  backward or activations
  [[gnu::cold]] FixedArray<Turn> walk_backward(UnshardedUnits& units, Phase phase) {
    bool const writes_gradients = phase == Phase::backward;
    auto const end = writes_gradients ? this->order().backward_end() : 0;
    auto const order = this->order().backward_turns(end);
    auto& lists = writes_gradients ? path_->ahead : path_->ahead_in_activations;
    FixedArray<Turn> turns(order.size());
    std::uint32_t rounded = 0;
    std::vector<std::uint32_t> lessees(program_.gradient_slots.size(), Program::none);
    Completion completion(*path_, program_.buckets, gradient_ends_, program_.gradient_order);
    for (std::size_t i = 0; i < order.size(); ++i) {
      auto& turn = turns[i];
      auto const use = order[i] % this->order().size();
      bool const recomputes = order[i] != use;
      auto& ahead = !recomputes ? lists.backward[use] : lists.recompute.empty() ? no_list_ : lists.recompute[use];
      std::size_t kept = 0;
      for (auto const next : ahead)
        if (comes_after(use, recomputes, next, end)) ahead[kept++] = next;
      while (ahead.size() > kept) ahead.pop_back();
      begin(turn, use, units, ahead, true, true);
      compute(turn, recomputes ? Primitive::recompute : Primitive::backward, units, writes_gradients && !recomputes);
      if (!recomputes && this->order().last_use_of_unit(use) && writes_gradients) {
        // The slot that was reduced last comes first: a wait for it implies the waits for the others.
        auto const together = units_of(use);
        for (auto const* at = together.end(); at != together.begin();) {
          auto const u = *--at;
          if (!path_->writes[u]) continue;
          begin_gradients(turn.before, u);
          if (!program_.units[u].writes_shards) lessees[path_->gradient_slots[u]] = u;
        }
      }
      bool const is_last =
          recomputes ? use < end && this->order().last_use_of_unit(use) : is_last_in_backward(use, end);
      if (!is_last) continue;
      for (auto const u : units_of(use)) {
        auto const& unit = program_.units[u];
        if (unit.empty()) continue;
        if (gathers(u)) drop(turn.after, u, units, in_backward(u) ? only(drops) : any_facts);
        if (path_->keeps_slice[u]) close(turn.after, u, Buffers::kept(unit.kept_slot), only(drops));
      }
      for (auto const u : units_of(use)) {
        auto const& unit = program_.units[u];
        if (!path_->writes[u] || !writes_gradients || recomputes) continue;
        if (unit.writes_shards) {
          end_direct_gradients(turn.after, u, completion);
        } else {
          end_gradients(turn.after, u, is_rounded(u) ? rounded++ % wires_in_turn() : Program::none);
        }
      }
    }
    if (!turns.empty() && writes_gradients)
      close_buffers(turns.back().after, turns.back().unit, lessees);  // before modules are declared, there are none
    return turns;
  }

  void drop(Operations& to, std::uint32_t u, UnshardedUnits& units, Facts when = any_facts) const {
    close(to, u, Buffers::whole(Pool::gather, units.slot(u)), when);
    units.drop(u);
  }
  /// Begins a use: gathers its unit, then the units of `ahead`.
  /// @param cut  shortens `ahead` where it would exceed max_ahead_bytes
  [[gnu::cold]] void begin(Turn& turn, std::size_t use, UnshardedUnits& units, std::vector<std::size_t>& ahead,
                           bool cut, bool in_backward = false) {
    turn.use = static_cast<std::uint32_t>(order().declared(use));
    turn.unit = static_cast<std::uint32_t>(order().unit(use));
    turn.place = static_cast<std::uint32_t>(use);
    auto const begin_gathers = [&](std::size_t of_use, bool is_ahead) {
      for (auto const u : units_of(of_use)) {
        if (gathers(u) && !units.is_unsharded(u)) {
          units.gather(u);
          gather(turn.before, u, units.slot(u), in_backward);
          units.set_ahead(u, is_ahead);
        }
        if (!is_ahead) units.set_ahead(u, false);
      }
    };
    begin_gathers(use, false);
    std::size_t taken = 0;
    for (; taken < ahead.size(); ++taken) {
      if (cut && exceeds_cap(units, ahead[taken])) break;
      begin_gathers(ahead[taken], true);
    }
    while (cut && ahead.size() > taken) ahead.pop_back();
  }
  /// @return whether what the use `next` lacks and the units gathered ahead so far exceed max_ahead_bytes
  bool exceeds_cap(UnshardedUnits const& units, std::size_t next) const {
    if (input_.max_ahead_bytes == 0) return false;
    std::int64_t lacking = 0;
    for (auto const u : units_of(next))
      if (gathers(u) && !units.is_unsharded(u)) lacking += param_bytes(u, program_.units[u].elements);
    return lacking > 0 && lacking + units.ahead_bytes() > input_.max_ahead_bytes;
  }
  /// @return whether a backward pass that ends with the use `end` comes to `next` after a turn of `use`, which has the
  /// use in its prefetch list. Uses below the end are recomputed if their segment has the end.
  bool comes_after(std::size_t use, bool recomputes, std::size_t next, std::size_t end) const {
    auto const segment = order().segment(next);
    if (next >= end) return true;
    return segment != UseOrder::none && segment == order().segment(end) &&
           (segment != order().segment(use) || (recomputes && next > use));
  }
  std::vector<std::size_t> no_list_;
};

}  // namespace detail

/// Compiles the step that runs as declared.
inline Program compile_program(StepInput const& input) { return detail::ProgramCompiler(input).compile(); }

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
