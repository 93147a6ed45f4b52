// SPDX-License-Identifier: Apache-2.0
// Writes the program of a step: decides when each unit is gathered and dropped, and which shared slot it gets.
// buffer_planner.hpp decides which units stay unsharded and which buffers exist; operation_writer.hpp writes
// reductions.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "fsdp/error.hpp"
#include "fsdp/step/operation_writer.hpp"
#include "fsdp/step/plan_events.hpp"
#include "fsdp/step/program.hpp"
#include "fsdp/step/schedule.hpp"
#include "fsdp/step/step_input.hpp"

namespace fsdp {

namespace detail {

/// The state of units while the compiler goes through the uses: which units are unsharded, and in which slot.
class UnshardedUnits {
 public:
  /// @param in_turn  number of shared slots, for units without a slot of their own; they are the last slots
  UnshardedUnits(Program const& program, std::size_t own_slots, std::size_t in_turn)
      : program_(&program),
        slots_(program.units.size(), Program::none),
        ahead_(program.units.size()),
        busy_(in_turn),
        own_slots_(static_cast<std::uint32_t>(own_slots)) {}

  /// The slot of a unit's parameters; none: it is sharded, or reads masters.
  std::uint32_t slot(std::size_t unit) const { return slots_[unit]; }
  bool is_unsharded(std::size_t unit) const { return slots_[unit] != Program::none; }
  /// The unit was gathered ahead, and its use has not begun.
  bool is_ahead(std::size_t unit) const { return ahead_[unit] != 0; }
  void set_ahead(std::size_t unit, bool ahead) { ahead_[unit] = ahead ? 1 : 0; }
  std::size_t most_in_turn() const { return most_in_turn_; }

  /// A forward pass begins.
  void restart(bool unsharded) {
    for (std::size_t unit = 0; unit < slots_.size(); ++unit) {
      drop(unit);
      if (unsharded && !program_->units[unit].reads_masters && program_->units[unit].in_backward) gather(unit);
    }
  }
  void gather(std::size_t unit) {
    auto const own = program_->units[unit].gather_slot;
    slots_[unit] = own == Program::none ? take() : own;
  }
  void drop(std::size_t unit) {
    auto const slot = slots_[unit];
    if (is_unsharded(unit) && slot >= own_slots_) {
      busy_[slot - own_slots_] = 0;
      --in_turn_;
    }
    slots_[unit] = Program::none;
    ahead_[unit] = 0;
  }

 private:
  /// The slot whose turn it is, or the next after it that is free: prefetch lists may overtake.
  std::uint32_t take() {
    while (busy_[position_ % busy_.size()] != 0) ++position_;
    auto const slot = position_++ % busy_.size();
    busy_[slot] = 1;
    most_in_turn_ = std::max(most_in_turn_, ++in_turn_);
    return own_slots_ + static_cast<std::uint32_t>(slot);
  }

  Program const* program_;
  std::vector<std::uint32_t> slots_, ahead_;  ///< by unit
  std::vector<std::uint32_t> busy_;           ///< by shared slot
  std::uint32_t own_slots_;
  std::size_t position_ = 0;
  std::size_t in_turn_ = 0, most_in_turn_ = 0;  ///< shared slots in use, now and at most
};

class ProgramCompiler : OperationWriter {
 public:
  [[gnu::cold]] explicit ProgramCompiler(StepInput const& input) : OperationWriter(input) {
    ahead_ = input.prefetch.forward.empty() ? prefetch_by_depth(schedule_, 1, 1, empty_units(input)) : input.prefetch;
  }

  [[gnu::cold]] Program compile() {
    plan_units();
    // With a slot for every unit, as many are in use at a time as are needed.
    gradient_slots_ = std::vector<std::uint32_t>(program_.units.size());
    program_.gradient_slots.push_back({});
    auto const needed = walk(program_.units.size());
    program_.gradient_slots.pop_back();
    share_slots(needed);
    walk(needed);
    for (std::uint32_t u = 0; u < program_.units.size(); ++u) write_updates(u);
    plan_events(program_, input_);
    return std::move(program_);
  }

 private:
  using Turn = Program::Turn;
  /// Writes all passes. @param in_turn  number of shared slots @return the largest number of them in use at a time
  [[gnu::cold]] std::size_t walk(std::size_t in_turn) {
    UnshardedUnits units(program_, own_gather_slots_, in_turn), evaluated = units, resident = units;
    units.restart(false);
    auto forward = walk_forward(units, Phase::forward, true);
    // A pass that finds parameters of an earlier pass has fewer gathers. Nothing else changes.
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
    FixedArray<Turn> turns(schedule_.size());
    for (std::size_t use = 0; use < schedule_.size(); ++use) {
      auto& turn = turns[use];
      begin(turn, use, units, ahead_.forward[use], cut);
      turn.compute = compute(Primitive::forward, turn.unit, units.slot(turn.unit));
      if (gathers(turn.unit) && !keeps_after_forward(use, phase)) {
        auto const kept = program_.units[turn.unit].kept_slot;
        if (phase == Phase::forward && kept != Program::none) keep_slice(turn.after, turn.unit, units.slot(turn.unit));
        drop(turn.after, turn.unit, units);
      }
    }
    return turns;
  }

  [[gnu::cold]] FixedArray<Turn> walk_backward(UnshardedUnits& units) {
    FixedArray<Turn> turns(schedule_.size() - backward_end_);
    std::uint32_t rounded = 0;
    std::vector<std::uint32_t> lessees(program_.gradient_slots.size(), 0);
    Completion completion;
    for (auto use = schedule_.size(); use-- > backward_end_;) {
      auto& turn = turns[schedule_.size() - 1 - use];
      auto& ahead = ahead_.backward[use];
      std::erase_if(ahead, [&](std::size_t next) { return next < backward_end_; });
      begin(turn, use, units, ahead, true, true);
      turn.compute = compute(Primitive::backward, turn.unit, units.slot(turn.unit));
      auto const& unit = program_.units[turn.unit];
      if (schedule_.last_use_of_unit(use) && unit.trains()) {
        begin_gradients(turn.before, turn.unit);
        if (!unit.writes_shards) lessees[gradient_slots_[turn.unit]] = turn.unit;
      }
      if (!unit.empty() && is_last_in_backward(use)) {
        if (gathers(turn.unit)) drop(turn.after, turn.unit, units, only(drops));
        if (unit.kept_slot != Program::none) close(turn.after, turn.unit, Buffers::kept(unit.kept_slot), only(drops));
        if (!unit.trains()) continue;
        if (unit.writes_shards) {
          end_direct_gradients(turn.after, turn.unit, completion);
        } else {
          end_gradients(turn.after, turn.unit, is_rounded(turn.unit) ? rounded++ % wires_in_turn() : Program::none);
        }
      }
    }
    if (!turns.empty())
      close_buffers(turns.back().after, turns.back().unit, lessees);  // before modules are declared, there are none
    return turns;
  }

  bool is_last_in_backward(std::size_t use) const {
    for (auto earlier = backward_end_; earlier < use; ++earlier)
      if (schedule_.unit(earlier) == schedule_.unit(use)) return false;
    return true;
  }
  void drop(Operations& to, std::uint32_t u, UnshardedUnits& units, Facts when = any_facts) const {
    close(to, u, Buffers::whole(Pool::gather, units.slot(u)), when);
    units.drop(u);
  }
  /// A use begins: its unit is gathered, then the units of `ahead`.
  /// @param cut  shortens `ahead` where it would exceed max_ahead_bytes
  [[gnu::cold]] void begin(Turn& turn, std::size_t use, UnshardedUnits& units, std::vector<std::size_t>& ahead,
                           bool cut, bool in_backward = false) {
    turn.use = static_cast<std::uint32_t>(use);
    turn.unit = static_cast<std::uint32_t>(schedule_.unit(use));
    auto const begin_gather = [&](std::size_t unit) {
      units.gather(unit);
      gather(turn.before, static_cast<std::uint32_t>(unit), units.slot(unit), in_backward);
    };
    if (gathers(turn.unit) && !units.is_unsharded(turn.unit)) begin_gather(turn.unit);
    units.set_ahead(turn.unit, false);
    std::size_t taken = 0;
    for (; taken < ahead.size(); ++taken) {
      auto const next = schedule_.unit(ahead[taken]);
      if (!gathers(next) || units.is_unsharded(next)) continue;
      if (cut && exceeds_cap(units, next)) break;
      begin_gather(next);
      units.set_ahead(next, true);
    }
    if (cut) ahead.erase(ahead.begin() + static_cast<std::ptrdiff_t>(taken), ahead.end());
  }
  /// @return whether `next` and the units gathered ahead so far exceed max_ahead_bytes
  bool exceeds_cap(UnshardedUnits const& units, std::size_t next) const {
    if (input_.max_ahead_bytes == 0) return false;
    auto elements = program_.units[next].elements;
    for (std::size_t u = 0; u < program_.units.size(); ++u)
      if (units.is_ahead(u)) elements += program_.units[u].elements;
    return elements > input_.max_ahead_bytes / static_cast<std::int64_t>(input_.param_bytes);
  }
  PrefetchLists ahead_;
};

}  // namespace detail

/// Compiles the step that runs as declared.
inline Program compile_program(StepInput const& input) { return detail::ProgramCompiler(input).compile(); }

}  // namespace fsdp
