// SPDX-License-Identifier: Apache-2.0
// Writes the program of a step: the one place that decides what is gathered when, what stays, and in which buffer.
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

/// Units while a step is walked through: which are unsharded, and in which slot.
class UnshardedUnits {
 public:
  struct State {
    bool unsharded = false;
    bool ahead = false;  ///< gathered ahead, and its use has not begun
    std::uint32_t slot = Program::none;
  };

  /// @param in_turn  so many slots, the last ones, are shared by the units that have none of their own
  UnshardedUnits(Program const& program, std::size_t own_slots, std::size_t in_turn)
      : program_(&program), states_(program.units.size()), busy_(in_turn, 0), own_slots_(own_slots) {}

  State& operator[](std::size_t unit) { return states_[unit]; }
  std::size_t most_in_turn() const { return most_in_turn_; }

  /// A forward pass begins.
  void restart(bool unsharded) {
    for (std::size_t unit = 0; unit < states_.size(); ++unit) {
      drop(unit);
      if (unsharded && !program_->units[unit].reads_masters) gather(unit);
    }
  }
  void gather(std::size_t unit) {
    auto const own = program_->units[unit].gather_slot;
    states_[unit] = {true, false, own == Program::none ? take() : own};
  }
  void drop(std::size_t unit) {
    auto& state = states_[unit];
    if (state.unsharded && state.slot >= own_slots_) give(state.slot - own_slots_);
    state = {};
  }

 private:
  /// The slot whose turn it is, or the next after it that is free: prefetch lists may overtake.
  std::uint32_t take() {
    while (busy_[position_ % busy_.size()]) ++position_;
    auto const slot = position_++ % busy_.size();
    busy_[slot] = 1;
    most_in_turn_ = std::max(most_in_turn_, ++in_turn_);
    return static_cast<std::uint32_t>(own_slots_ + slot);
  }
  void give(std::size_t slot) {
    busy_[slot] = 0;
    --in_turn_;
  }

  Program const* program_;
  std::vector<State> states_;
  std::vector<std::size_t> busy_;  ///< by shared slot: units that are in it, one or none
  std::size_t own_slots_, position_ = 0;
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
    gradient_slots_.assign(program_.units.size(), 0);
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
  /// Operations that are not in `fewer`, which has the others in the same order, need sharded parameters at first.
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

  [[gnu::cold]] std::vector<Turn> walk_forward(UnshardedUnits& units, Phase phase, bool cut) {
    std::vector<Turn> turns;
    for (std::size_t use = 0; use < schedule_.size(); ++use) {
      auto turn = begin(use, units, ahead_.forward[use], cut);
      turn.compute = compute(Primitive::forward, turn.unit, units[turn.unit].slot);
      if (gathers(turn.unit) && !keeps_after_forward(use, phase)) {
        auto const kept = program_.units[turn.unit].kept_slot;
        if (phase == Phase::forward && kept != Program::none) keep_slice(turn.after, turn.unit, units[turn.unit].slot);
        drop(turn.after, turn.unit, units);
      }
      turns.push_back(std::move(turn));
    }
    return turns;
  }

  [[gnu::cold]] std::vector<Turn> walk_backward(UnshardedUnits& units) {
    std::vector<Turn> turns;
    std::uint32_t rounded = 0;
    std::vector<std::uint32_t> lessees(program_.gradient_slots.size(), 0);
    Completion completion;
    for (auto use = schedule_.size(); use-- > 0;) {
      auto turn = begin(use, units, ahead_.backward[use], true, true);
      turn.compute = compute(Primitive::backward, turn.unit, units[turn.unit].slot);
      auto const& unit = program_.units[turn.unit];
      if (schedule_.last_use_of_unit(use) && !unit.empty()) {
        begin_gradients(turn.before, turn.unit);
        if (!unit.writes_shards) lessees[gradient_slots_[turn.unit]] = turn.unit;
      }
      if (schedule_.first_use_of_unit(use) && !unit.empty()) {
        if (gathers(turn.unit)) drop(turn.after, turn.unit, units, only(drops));
        if (unit.kept_slot != Program::none) close(turn.after, turn.unit, Buffers::kept(unit.kept_slot), only(drops));
        if (unit.writes_shards) {
          end_direct_gradients(turn.after, turn.unit, completion);
        } else {
          end_gradients(turn.after, turn.unit, is_rounded(turn.unit) ? rounded++ % wires_in_turn() : Program::none);
        }
      }
      turns.push_back(std::move(turn));
    }
    if (!turns.empty())
      close_buffers(turns.back().after, turns.back().unit, lessees);  // before modules are declared, there are none
    return turns;
  }

  void drop(Operations& to, std::uint32_t u, UnshardedUnits& units, Facts when = any_facts) const {
    close(to, u, Buffers::whole(Pool::gather, units[u].slot), when);
    units.drop(u);
  }
  /// A use begins: its unit is gathered, then those of `ahead`, which is cut where too much waits for its use.
  [[gnu::cold]] Turn begin(std::size_t use, UnshardedUnits& units, std::vector<std::size_t>& ahead, bool cut,
                           bool in_backward = false) {
    Turn turn;
    turn.use = static_cast<std::uint32_t>(use);
    turn.unit = static_cast<std::uint32_t>(schedule_.unit(use));
    auto const begin_gather = [&](std::size_t unit) {
      units.gather(unit);
      gather(turn.before, static_cast<std::uint32_t>(unit), units[unit].slot, in_backward);
    };
    if (gathers(turn.unit) && !units[turn.unit].unsharded) begin_gather(turn.unit);
    units[turn.unit].ahead = false;
    std::size_t taken = 0;
    for (; taken < ahead.size(); ++taken) {
      auto const next = schedule_.unit(ahead[taken]);
      if (!gathers(next) || units[next].unsharded) continue;
      if (cut && exceeds_cap(units, next)) break;
      begin_gather(next);
      units[next].ahead = true;
    }
    if (cut) ahead.resize(taken);
    return turn;
  }
  /// @return whether `next` and the units gathered ahead so far exceed max_ahead_bytes
  bool exceeds_cap(UnshardedUnits& units, std::size_t next) const {
    if (input_.max_ahead_bytes == 0) return false;
    auto elements = program_.units[next].elements;
    for (std::size_t u = 0; u < program_.units.size(); ++u)
      if (units[u].ahead) elements += program_.units[u].elements;
    return elements > input_.max_ahead_bytes / static_cast<std::int64_t>(input_.param_bytes);
  }
  PrefetchLists ahead_;
};

}  // namespace detail

/// Compiles the step that runs as declared.
inline Program compile_program(StepInput const& input) { return detail::ProgramCompiler(input).compile(); }

}  // namespace fsdp
