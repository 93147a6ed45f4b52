// SPDX-License-Identifier: Apache-2.0
// The order in which a pass uses units. Host logic only: nothing here moves.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/detail/base/fixed_array.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// For each use, the uses whose units are gathered when it begins, after its own.
struct PrefetchLists {
  std::vector<std::vector<std::size_t>> forward, backward;
  std::vector<std::vector<std::size_t>> recompute{};  ///< when it is recomputed; empty: none
};

/// The order in which modules use units in a forward pass; a backward pass has the reverse. A *use* is one
/// module's computation with a unit; a unit may have several: neighbours, or with other units' uses between them. An
/// index counts the uses in this order.
///
/// [Note: Segments] A segment is consecutive uses that are recomputed together. In a backward pass, its uses are
/// recomputed in forward order, all before the first backward of them. If a backward pass ends inside a segment, all
/// its uses are recomputed: the activations of the lower ones are the inputs of the others.
///
/// [Note: Paths] Modules declare one order. A *path* is another order of the same uses: it may leave some out, and
/// repeat some. Each path has its own turns in the program; buffers are the same for all.
class UseOrder {
 public:
  static constexpr std::size_t none = ~std::size_t{0};

  UseOrder() = default;
  /// A path. @param uses  of `declared`; segments of them are complete
  [[gnu::cold]] UseOrder(UseOrder const& declared, std::string path, std::vector<std::size_t> const& uses)
      : path_(std::move(path)) {
    for (auto const use : uses) {
      auto const at = declare(declared.unit(use), declared.uses_[use].module);
      uses_[at].declared = use;
      if (auto const first = declared.segment(use); first != none) set_segment(at, at - (use - first));
    }
  }

  /// Declares the next use, of `unit`, by the module called `module`. @return the use's index
  [[gnu::cold]] std::size_t declare(std::size_t unit, std::string module) {
    auto const at = uses_.size();
    if (units_.size() <= unit) units_.resize(unit + 1);
    auto& of = units_[unit];
    uses_.push_back({unit, at, of.last, std::move(module)});
    of.gaps += of.last != none && of.last + 1 != at;
    of.last = at;
    return at;
  }
  /// Forgets all but the first `count` uses.
  /// @pre none of the forgotten ones belongs to a segment
  [[gnu::cold]] void truncate(std::size_t count) noexcept {
    for (; uses_.size() > count; uses_.pop_back()) {
      auto& of = units_[uses_.back().unit];
      of.last = uses_.back().previous;
      of.gaps -= of.last != none && of.last + 2 != uses_.size();
    }
  }

  std::size_t size() const { return uses_.size(); }
  std::size_t unit(std::size_t use) const { return uses_[use].unit; }
  std::string_view module_name(std::size_t use) const { return uses_[use].module; }

  /// The unit is used again after others have been, at this use or another.
  bool returns(std::size_t use) const { return units_[uses_[use].unit].gaps > 0; }
  bool first_use_of_unit(std::size_t use) const { return uses_[use].previous == none; }
  bool last_use_of_unit(std::size_t use) const { return units_[uses_[use].unit].last == use; }
  bool unit_returns(std::size_t index) const { return index < units_.size() && units_[index].gaps > 0; }
  /// The unit of `index` has some use.
  bool used(std::size_t index) const { return last_use(index) != none; }
  /// The last use of the unit of `index`; none: it has no use.
  std::size_t last_use(std::size_t index) const { return index < units_.size() ? units_[index].last : none; }
  /// The use of the same unit before this one; none: there is none.
  std::size_t previous_use(std::size_t use) const { return uses_[use].previous; }
  /// The use belongs to the segment that begins with the use `first`; none: to no segment.
  void set_segment(std::size_t use, std::size_t first) {
    auto& in_segments = units_[uses_[use].unit].in_segments;
    in_segments -= uses_[use].segment != none;
    in_segments += first != none;
    uses_[use].segment = first;
  }
  /// The first use of its segment; none: it is in none.
  std::size_t segment(std::size_t use) const { return uses_[use].segment; }
  /// Some use of the unit is in a segment.
  bool in_segment(std::size_t index) const { return index < units_.size() && units_[index].in_segments > 0; }
  bool ends_segment(std::size_t use) const {
    auto const first = uses_[use].segment;
    return first != none && (use + 1 == size() || uses_[use + 1].segment != first);
  }
  /// The turns of a backward pass, in order. A turn is a use; if the use is recomputed, plus size().
  /// @param end  the last use
  [[gnu::cold]] std::vector<std::size_t> backward_turns(std::size_t end) const {
    std::vector<std::size_t> turns;
    for (auto use = size(); use-- > end;) {
      if (ends_segment(use))
        for (auto again = segment(use); again <= use; ++again) turns.push_back(size() + again);
      turns.push_back(use);
    }
    return turns;
  }
  /// The number of a use in the declared order.
  std::size_t declared(std::size_t use) const { return uses_[use].declared; }
  /// The name of the path; empty: the declared order.
  std::string const& path() const { return path_; }

 private:
  struct Use {
    std::size_t unit;
    std::size_t declared;
    std::size_t previous;  ///< use of the same unit; none: this is its first
    std::string module;
    std::size_t segment = none;
  };
  struct UsesOfUnit {
    std::size_t last = none;
    std::size_t gaps = 0;         ///< uses that do not follow the unit's use before
    std::size_t in_segments = 0;  ///< uses that belong to a segment
  };

  std::string path_;
  std::vector<Use> uses_;
  std::vector<UsesOfUnit> units_;  ///< by unit; may be shorter than the list of units
};

/// For each use: in forward, the first uses of the next `forward` units; in backward, of the `backward` units whose
/// turns come next.
/// @param empty  by unit: it has no parameters, so nothing is gathered for it and it does not count; {}: no unit is
[[gnu::cold]] inline PrefetchLists prefetch_by_depth(UseOrder const& schedule, int forward, int backward,
                                                     detail::FixedArray<bool> const& empty = {}) {
  auto const uses = schedule.size();
  auto const turns = schedule.backward_turns(0);
  using Lists = std::vector<std::vector<std::size_t>>;
  PrefetchLists lists{Lists(uses), Lists(uses), Lists(turns.size() > uses ? uses : 0)};
  /// For each position, the next position with a different unit that has parameters; `count` if there is none.
  auto const next_units = [&](std::size_t count, auto const& unit_at) {
    std::vector<std::size_t> next(count);
    auto filled = count;  // the next position whose unit has parameters
    for (auto at = count; at-- > 0;) {
      auto const unit = unit_at(at);
      next[at] = filled < count && unit_at(filled) == unit ? next[filled] : filled;
      if (empty.empty() || !empty[unit]) filled = at;
    }
    return next;
  };
  auto const use_at = [&](std::size_t turn) { return turns[turn] % uses; };
  auto const next_use = next_units(uses, [&](std::size_t use) { return schedule.unit(use); });
  auto const next_turn = next_units(turns.size(), [&](std::size_t turn) { return schedule.unit(use_at(turn)); });
  for (std::size_t use = 0; use < uses; ++use) {
    auto ahead = next_use[use];
    for (int taken = 0; taken < forward && ahead < uses; ++taken, ahead = next_use[ahead])
      lists.forward[use].push_back(ahead);
  }
  for (std::size_t turn = 0; turn < turns.size(); ++turn) {
    auto& list = (turns[turn] < uses ? lists.backward : lists.recompute)[use_at(turn)];
    auto ahead = next_turn[turn];
    for (int taken = 0; taken < backward && ahead < turns.size(); ++taken, ahead = next_turn[ahead])
      list.push_back(use_at(ahead));
  }
  return lists;
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
