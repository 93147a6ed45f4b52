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

/// `recompute`: a module's forward is computed again, in a backward pass.
enum class Pass : unsigned char { idle, forward, backward, recompute };

constexpr std::string_view name(Pass pass) {
  switch (pass) {
    case Pass::idle: return "idle";
    case Pass::forward: return "forward";
    case Pass::backward: return "backward";
    case Pass::recompute: return "recompute";
  }
  return "?";
}

/// For each use, the uses whose units are gathered when it begins, after its own.
struct PrefetchLists {
  std::vector<std::vector<std::size_t>> forward, backward;
  std::vector<std::vector<std::size_t>> recompute{};  ///< when it is recomputed; empty: none
};

/// The order in which modules use units: forward in the order of declaration, backward in reverse. A *use* is one
/// module's turn; a unit may have several: neighbours, or with other units' uses between them.
///
/// [Note: Segments] A segment is consecutive uses that are recomputed together. In a backward pass, its uses are
/// recomputed in forward order, all before the first backward of them. If a backward pass ends inside a segment, all
/// its uses are recomputed: the activations of the lower ones are the inputs of the others.
class Schedule {
 public:
  static constexpr std::size_t none = ~std::size_t{0};

  explicit Schedule(int rank) : rank_(rank) {}

  /// Declares the next use, of `unit`, by the module called `module`. @return the use's index
  [[gnu::cold]] std::size_t declare(std::size_t unit, std::string module) {
    Use added{unit, std::move(module), true, true, false, none};
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
  /// The use belongs to the segment that begins with the use `first`; none: to no segment.
  void set_segment(std::size_t use, std::size_t first) { uses_[use].segment = first; }
  /// The first use of its segment; none: it is in none.
  std::size_t segment(std::size_t use) const { return uses_[use].segment; }
  /// Some use of the unit is in a segment.
  bool in_segment(std::size_t index) const {
    for (auto const& use : uses_)
      if (use.unit == index && use.segment != none) return true;
    return false;
  }
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
  /// Turns of the pass under way that are complete.
  std::size_t turns_done() const { return turns_; }
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
    FSDP_EXPECTS(!open_, "rank {}: {}, but {} of '{}' has not ended", rank_, what, name(open_pass()),
                 module_name(current_));
  }

  /// A forward use begins. @return true if it is the first of a new pass
  /// @throws OrderError naming both modules if another use was declared next; UsageError if one is open
  /// @pre no backward pass is under way
  bool begin_forward(std::size_t use) {
    expect_next(Pass::forward, use);
    bool const starts = pass_ != Pass::forward || next_ == size();
    expect({Pass::forward, starts ? 0 : next_}, {Pass::forward, use});
    pass_ = Pass::forward;
    if (starts) turns_ = 0;
    enter(use);
    return starts;
  }
  void end_forward(std::size_t use) {
    leave(use);
    next_ = use + 1;
  }

  /// A backward use begins, or a use is recomputed. @return true if it is the first of a new pass
  /// @param pass         backward or recompute
  /// @param activations  such a pass writes no gradients, and comes to every use
  /// @throws as begin_forward
  bool begin_backward(Pass pass, std::size_t use, bool activations = false) {
    expect_next(pass, use);
    bool const starts = pass_ == Pass::forward;
    if (pass_ == Pass::idle)  // each text with four names: compilers then have one function for all
      fail<OrderError>(
          "rank {}: {} of '{}' was called without a {} pass: none has run since the last {}, or an evaluation, an "
          "optimizer step, an import or an exception has discarded it; call forward first",
          rank_, name(pass), module_name(use), name(Pass::forward), name(Pass::backward));
    if (starts && next_ != size())
      fail<OrderError>("rank {}: {} of '{}' was called before the forward pass was complete; expected {} of '{}' next",
                       rank_, name(pass), module_name(use), name(Pass::forward), module_name(next_));
    auto const expected = next_backward();
    expect(expected, {pass, use});
    if (starts) {
      recompute_ = expected.pass == Pass::recompute ? use : none;
      activations_ = activations;
      turns_ = 0;
    }
    pass_ = Pass::backward;
    enter(use);
    return starts;
  }
  /// @return true if that completes the backward pass
  bool end_backward(std::size_t use) {
    leave(use);
    if (recompute_ != none) {
      recompute_ = use + 1 == next_ ? none : use + 1;
      return false;
    }
    next_ = use;
    if (use == pass_end()) return reset(), true;
    recompute_ = first_before(use);
    return false;
  }

  /// Backward passes end with this use.
  void set_backward_end(std::size_t use) { backward_end_ = use; }
  /// @return whether backward passes do not come to the use: nothing at or below it trains; or do not recompute it:
  /// nothing at or below its segment's last use does
  /// @param pass  backward or recompute
  /// @throws OrderError if it is called before the backward pass is complete; UsageError if a use is open
  bool skips_backward(Pass pass, std::size_t use) const {
    auto last = use;
    if (pass == Pass::recompute)
      while (last < pass_end() && !ends_segment(last)) ++last;
    if (last >= pass_end()) return false;
    expect_next(pass, use);
    if (pass_ != Pass::idle) refuse(next_backward(), {pass, use});
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
    std::size_t segment;
  };
  struct Turn {
    Pass pass;
    std::size_t use;
  };
  void expect(Turn expected, Turn got) const {
    if (got.use != expected.use || got.pass != expected.pass) refuse(expected, got);
  }
  [[noreturn, gnu::cold]] void refuse(Turn expected, Turn got) const {
    fail<OrderError>(
        "rank {}: modules must run in the order in which they were added: expected {} of '{}', got {} of '{}'", rank_,
        name(expected.pass), module_name(expected.use), name(got.pass), module_name(got.use));
  }
  /// The use that is recomputed before the backward of the use before `use`; none: none is.
  std::size_t first_before(std::size_t use) const { return ends_segment(use - 1) ? segment(use - 1) : none; }
  /// The next turn of the backward pass under way, or the first one of the next backward pass.
  Turn next_backward() const {
    auto const again = pass_ == Pass::forward ? first_before(size()) : recompute_;
    if (again != none) return {Pass::recompute, again};
    return {Pass::backward, (pass_ == Pass::forward ? size() : next_) - 1};
  }
  Pass open_pass() const { return pass_ == Pass::backward && recompute_ != none ? Pass::recompute : pass_; }
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
    FSDP_EXPECTS(open_ && current_ == use, "rank {}: {} of '{}' ends, but has not begun", rank_, name(open_pass()),
                 module_name(use));
    open_ = false;
    ++turns_;
  }

  int rank_;
  std::vector<Use> uses_;
  Pass pass_ = Pass::idle;
  std::size_t backward_end_ = 0;
  std::size_t next_ = 0;          ///< forward: uses done; backward: uses still to do
  std::size_t recompute_ = none;  ///< backward: the use that is recomputed next; none: the next turn is a backward
  std::size_t turns_ = 0;         ///< of the pass under way that are complete
  std::size_t current_ = 0;       ///< the use under way while open_
  bool open_ = false;
  bool broken_ = false;
  bool activations_ = false;  ///< the backward pass under way writes no gradients
};

/// For each use: in forward, the first uses of the next `forward` units; in backward, of the `backward` units whose
/// turns come next.
/// @param empty  by unit: it has no parameters, so nothing is gathered for it and it does not count; {}: no unit is
[[gnu::cold]] inline PrefetchLists prefetch_by_depth(Schedule const& schedule, int forward, int backward,
                                                     detail::FixedArray<bool> const& empty = {}) {
  auto const uses = schedule.size();
  auto const turns = schedule.backward_turns(0);
  using Lists = std::vector<std::vector<std::size_t>>;
  PrefetchLists lists{Lists(uses), Lists(uses), Lists(turns.size() > uses ? uses : 0)};
  /// Appends `ahead` if it begins another unit than the last use that counts.
  auto const add = [&](std::vector<std::size_t>& list, std::size_t& last, std::size_t ahead) {
    auto const unit = schedule.unit(ahead);
    if (!empty.empty() && empty[unit]) return;
    if (unit != last) list.push_back(ahead);
    last = unit;
  };
  for (std::size_t use = 0; use < uses; ++use) {
    auto& in_forward = lists.forward[use];
    auto last = schedule.unit(use);
    for (auto ahead = use + 1; ahead < uses && in_forward.size() < static_cast<std::size_t>(forward); ++ahead)
      add(in_forward, last, ahead);
  }
  for (std::size_t turn = 0; turn < turns.size(); ++turn) {
    auto const use = turns[turn] % uses;
    auto& list = turns[turn] < uses ? lists.backward[use] : lists.recompute[use];
    auto last = schedule.unit(use);
    for (auto ahead = turn + 1; ahead < turns.size() && list.size() < static_cast<std::size_t>(backward); ++ahead)
      add(list, last, turns[ahead] % uses);
  }
  return lists;
}

}  // namespace fsdp
