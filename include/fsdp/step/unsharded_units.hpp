// SPDX-License-Identifier: Apache-2.0
// Which units are unsharded, and in which slot, while a step is compiled.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "fsdp/step/program.hpp"

namespace fsdp::detail {

/// Units while a step is walked through: which are unsharded, and in which slot.
class UnshardedUnits {
 public:
  struct State {
    bool unsharded = false;
    bool awaited = false;  ///< compute has waited for the gather
    bool ahead = false;    ///< gathered ahead, and its use has not begun
    std::uint32_t slot = Operation::no_slot;
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
      if (!unsharded || program_->units[unit].reads_masters) continue;
      gather(unit);
      states_[unit].awaited = true;
    }
  }
  void gather(std::size_t unit) {
    auto const own = program_->units[unit].gather_slot;
    states_[unit] = {true, false, false, own == Operation::no_slot ? take() : own};
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

}  // namespace fsdp::detail
