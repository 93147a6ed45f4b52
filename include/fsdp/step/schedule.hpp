// SPDX-License-Identifier: Apache-2.0
// The declared order of uses, and the check that every pass obeys it. Host logic only: nothing here moves.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/error.hpp"
#include "fsdp/fixed_array.hpp"

namespace fsdp {

enum class Pass : unsigned char { idle, forward, backward };

constexpr std::string_view name(Pass pass) {
  switch (pass) {
    case Pass::idle: return "idle";
    case Pass::forward: return "forward";
    case Pass::backward: return "backward";
  }
  return "?";
}

/// For each use, the uses whose units are gathered when it begins, after its own.
struct PrefetchLists {
  std::vector<std::vector<std::size_t>> forward, backward;
};

/// The order in which modules use units: forward in the order of declaration, backward in reverse. A *use* is one
/// module's turn; a unit may have several: neighbours, or with other units' uses between them.
class Schedule {
 public:
  explicit Schedule(int rank) : rank_(rank) {}

  /// Declares the next use, of `unit`, by the module called `module`. @return the use's index
  [[gnu::cold]] std::size_t declare(std::size_t unit, std::string module) {
    Use added{unit, std::move(module), true, true, false};
    for (auto& earlier : uses_) {
      if (earlier.unit != unit) continue;
      added.first_of_unit = false;
      earlier.last_of_unit = false;
      added.returns = earlier.returns |= uses_.back().unit != unit;
    }
    uses_.push_back(std::move(added));
    return uses_.size() - 1;
  }

  std::size_t size() const { return uses_.size(); }
  std::size_t unit(std::size_t use) const { return uses_[use].unit; }
  std::string_view module_name(std::size_t use) const { return uses_[use].module; }
  Pass pass() const { return pass_; }

  /// The unit is used again after others have been, at this use or another.
  bool returns(std::size_t use) const { return uses_[use].returns; }
  bool first_use_of_unit(std::size_t use) const { return uses_[use].first_of_unit; }
  bool last_use_of_unit(std::size_t use) const { return uses_[use].last_of_unit; }
  bool unit_returns(std::size_t index) const {
    for (auto const& use : uses_)
      if (use.unit == index) return use.returns;
    return false;
  }
  /// The unit of `index` has some use.
  bool used(std::size_t index) const {
    for (auto const& use : uses_)
      if (use.unit == index) return true;
    return false;
  }
  /// A backward pass is in progress, or an exception has interrupted it.
  bool in_backward() const { return pass_ == Pass::backward; }
  /// An exception has interrupted the backward pass, and it cannot go on.
  bool backward_broken() const { return broken_; }
  /// A forward pass has begun and is not complete.
  bool in_forward() const { return pass_ == Pass::forward && next_ < size(); }
  bool is_open() const { return open_; }
  /// The backward pass in progress has completed `use`.
  bool backward_done(std::size_t use) const { return use >= next_; }

  /// @throws UsageError if a use is open, naming its module
  /// @param what  the refused action, for the message
  void expect_closed(std::string_view what) const {
    FSDP_EXPECTS(!open_, "rank {}: {}, but {} of '{}' has not ended", rank_, what, name(pass_), module_name(current_));
  }

  /// A forward use begins. @return true if it is the first of a new pass
  /// @throws OrderError naming both modules if another use was declared next; UsageError if one is open
  /// @pre no backward pass is under way
  bool begin_forward(std::size_t use) {
    expect_next(Pass::forward, use);
    bool const starts = pass_ != Pass::forward || next_ == size();
    auto const expected = starts ? 0 : next_;
    expect(use == expected, Pass::forward, expected, use);
    pass_ = Pass::forward;
    enter(use);
    return starts;
  }
  void end_forward(std::size_t use) {
    leave(use);
    next_ = use + 1;
  }

  /// A backward use begins. @return true if it is the first of a new pass
  /// @param activations  such a pass writes no gradients, and comes to every use
  /// @throws as begin_forward
  bool begin_backward(std::size_t use, bool activations = false) {
    expect_next(Pass::backward, use);
    bool const starts = pass_ == Pass::forward;
    if (pass_ == Pass::idle)
      fail<OrderError>(
          "rank {}: backward of '{}' was called without a forward pass: none has run since the last backward, or an "
          "evaluation, an optimizer step, an import or an exception has discarded it; call forward first",
          rank_, module_name(use));
    if (starts && next_ != size())
      fail<OrderError>(
          "rank {}: backward of '{}' was called before the forward pass was complete; expected forward of '{}' next",
          rank_, module_name(use), module_name(next_));
    auto const expected = starts ? size() - 1 : next_ - 1;
    expect(use == expected, Pass::backward, expected, use);
    pass_ = Pass::backward;
    if (starts) activations_ = activations;
    enter(use);
    return starts;
  }
  /// @return true if that completes the backward pass
  bool end_backward(std::size_t use) {
    leave(use);
    next_ = use;
    if (use != pass_end()) return false;
    reset();
    return true;
  }

  /// Backward passes end with this use.
  void set_backward_end(std::size_t use) { backward_end_ = use; }
  /// @return whether backward passes do not come to the use: nothing at or below it trains
  /// @throws OrderError if it is called before the backward pass is complete; UsageError if a use is open
  bool skips_backward(std::size_t use) const {
    if (use >= pass_end()) return false;
    expect_next(Pass::backward, use);
    if (pass_ != Pass::idle) expect(false, Pass::backward, pass_ == Pass::forward ? size() - 1 : next_ - 1, use);
    return true;
  }

  /// Forgets a pass under way: the next use starts a new forward pass.
  void reset() {
    pass_ = Pass::idle;
    next_ = 0;
    open_ = broken_ = activations_ = false;
  }
  /// An exception has ended the use under way. The pass is forgotten, unless it writes gradients.
  void interrupt() {
    if (pass_ != Pass::backward || activations_) return reset();
    open_ = false;
    broken_ = true;
  }

 private:
  struct Use {
    std::size_t unit;
    std::string module;
    bool first_of_unit;
    bool last_of_unit;
    bool returns;
  };
  void expect(bool ordered, Pass pass, std::size_t expected, std::size_t got) const {
    if (!ordered)
      fail<OrderError>(
          "rank {}: modules must run in the order in which they were added: expected {} of '{}', got {} of '{}'", rank_,
          name(pass), module_name(expected), name(pass), module_name(got));
  }
  void expect_next(Pass pass, std::size_t use) const {
    if (open_) expect_closed(formatted("{} of '{}' begins", name(pass), module_name(use)));
  }
  /// The last use of the backward pass under way, or of the next one.
  std::size_t pass_end() const { return activations_ ? 0 : backward_end_; }
  void enter(std::size_t use) {
    open_ = true;
    current_ = use;
  }
  void leave(std::size_t use) {
    FSDP_EXPECTS(open_ && current_ == use, "rank {}: {} of '{}' ends, but has not begun", rank_, name(pass_),
                 module_name(use));
    open_ = false;
  }

  int rank_;
  std::vector<Use> uses_;
  Pass pass_ = Pass::idle;
  std::size_t backward_end_ = 0;
  std::size_t next_ = 0;     ///< forward: uses done; backward: uses still to do
  std::size_t current_ = 0;  ///< the use under way while open_
  bool open_ = false;
  bool broken_ = false;
  bool activations_ = false;  ///< the backward pass under way writes no gradients
};

/// For each use: in forward, the first uses of the next `forward` units; in backward, the last uses of the previous
/// `backward` units.
/// @param empty  by unit: it has no parameters, so nothing is gathered for it and it does not count; {}: no unit is
[[gnu::cold]] inline PrefetchLists prefetch_by_depth(Schedule const& schedule, int forward, int backward,
                                                     detail::FixedArray<bool> const& empty = {}) {
  auto const uses = schedule.size();
  PrefetchLists lists{std::vector<std::vector<std::size_t>>(uses), std::vector<std::vector<std::size_t>>(uses)};
  /// Appends `ahead` if it begins another unit than the last use that counts.
  auto const add = [&](std::vector<std::size_t>& list, std::size_t& last, std::size_t ahead) {
    auto const unit = schedule.unit(ahead);
    if (!empty.empty() && empty[unit]) return;
    if (unit != last) list.push_back(ahead);
    last = unit;
  };
  for (std::size_t use = 0; use < uses; ++use) {
    auto &in_forward = lists.forward[use], &in_backward = lists.backward[use];
    auto last = schedule.unit(use);
    for (auto ahead = use + 1; ahead < uses && in_forward.size() < static_cast<std::size_t>(forward); ++ahead)
      add(in_forward, last, ahead);
    last = schedule.unit(use);
    for (auto ahead = use; ahead > 0 && in_backward.size() < static_cast<std::size_t>(backward); --ahead)
      add(in_backward, last, ahead - 1);
  }
  return lists;
}

}  // namespace fsdp
