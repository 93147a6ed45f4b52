// SPDX-License-Identifier: Apache-2.0
// The declared order of uses, and the check that each pass follows it. Host logic only: nothing here moves.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "fsdp/error.hpp"
#include "fsdp/step/use_order.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

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

/// Checks that every pass obeys its order: forward in the order of the path that is followed, or of declaration;
/// backward in reverse.
class Schedule : public UseOrder {
 public:
  explicit Schedule(int rank) : rank_(rank) {}

  Pass pass() const { return pass_; }
  /// The order of the pass in progress, or of the last one.
  UseOrder const& order() const { return now_ == nullptr ? *this : *now_; }
  /// Number of complete turns of the pass in progress.
  std::size_t turns_done() const { return turns_; }
  /// Whether a backward pass is in progress, or was interrupted by an exception.
  bool in_backward() const { return pass_ == Pass::backward; }
  /// Whether an exception has interrupted the backward pass, so that it cannot go on.
  bool backward_broken() const { return broken_; }
  /// Whether a forward pass has begun and is not complete.
  bool in_forward() const { return pass_ == Pass::forward && next_ < order().size(); }
  /// The next module. @pre in_forward()
  std::string_view next_module() const { return order().module_name(next_); }
  bool is_open() const { return open_; }
  /// Whether the backward pass in progress has completed `use`.
  bool backward_done(std::size_t use) const { return use >= next_; }

  /// @throws UsageError if a use is open, naming its module
  /// @param what  the refused action, for the message
  void expect_closed(std::string_view what) const {
    FSDP_EXPECTS(!open_, "rank {}: {}, but {} of '{}' has not ended; end it first", rank_, what, name(open_pass()),
                 module_name(current_));
  }

  /// Begins a forward use. @return true if it is the first of a new pass
  /// @param path  order of a new pass, which must outlive it; nullptr: the declared one
  /// @throws OrderError naming both modules if another use was declared next; UsageError if one is open
  /// @pre no backward pass is under way
  bool begin_forward(std::size_t use, UseOrder const* path = nullptr) {
    expect_next(Pass::forward, use);
    bool const starts = pass_ != Pass::forward || next_ == order().size();
    auto const& order = !starts ? this->order() : path == nullptr ? *this : *path;
    expect(order, {Pass::forward, starts ? 0 : next_}, Pass::forward, use);
    pass_ = Pass::forward;
    if (starts) turns_ = next_ = 0, now_ = path;
    enter(use);
    return starts;
  }
  void end_forward(std::size_t use) {
    leave(use);
    ++next_;
  }

  /// Begins a backward use, or the recomputation of a use. @return true if it is the first of a new pass
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
    if (starts && next_ != order().size())
      fail<OrderError>("rank {}: {} of '{}' was called before the forward pass was complete; expected {} of '{}' next",
                       rank_, name(pass), module_name(use), name(Pass::forward), order().module_name(next_));
    auto const expected = next_backward();
    expect(order(), expected, pass, use);
    if (starts) {
      recompute_ = expected.pass == Pass::recompute ? expected.use : none;
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
      recompute_ = recompute_ + 1 == next_ ? none : recompute_ + 1;
      return false;
    }
    if (--next_ == pass_end()) return reset(), true;
    recompute_ = first_before(next_);
    return false;
  }

  /// @return whether backward passes do not come to the use, because no unit at or below it trains, or do not recompute
  /// it, because none at or below its segment's last use does. If a path repeats the use: whether the pass is complete
  /// @param pass  backward or recompute
  /// @throws OrderError if it is called before the backward pass is complete; UsageError if a use is open
  bool skips_backward(Pass pass, std::size_t use) const {
    auto const& order = this->order();
    auto const end = pass_end();
    bool below = false, above = false;
    auto at = now_ == nullptr ? use : order.last_use(unit(use));
    for (; at != none; at = now_ == nullptr ? none : order.previous_use(at)) {
      if (order.declared(at) != use) continue;
      auto last = at;
      if (pass == Pass::recompute)
        while (last < end && !order.ends_segment(last)) ++last;
      (last < end ? below : above) = true;
    }
    if (!below) return false;
    expect_next(pass, use);
    if (pass_ == Pass::idle) return true;
    if (!above) refuse(order, next_backward(), pass, use);
    return false;
  }

  /// Abandons a pass in progress: the next use starts a new forward pass.
  void reset() {
    pass_ = Pass::idle;
    next_ = 0;
    open_ = broken_ = activations_ = false;
  }
  /// Ends the use in progress after an exception. The pass is abandoned, unless it writes gradients.
  void interrupt() {
    if (pass_ != Pass::backward || activations_) return reset();
    open_ = false;
    broken_ = true;
  }

 private:
  struct Turn {
    Pass pass;
    std::size_t use;
  };
  /// @param expected  counted in the order. @param use  counted in the declared one
  void expect(UseOrder const& order, Turn expected, Pass pass, std::size_t use) const {
    if (use != order.declared(expected.use) || pass != expected.pass) refuse(order, expected, pass, use);
  }
  [[noreturn, gnu::cold]] void refuse(UseOrder const& order, Turn expected, Pass pass, std::size_t use) const {
    auto const which = order.path().empty() ? std::string("in which they were added")
                                            : formatted("of path '{}', which the pass follows", order.path());
    fail<OrderError>("rank {}: modules must run in the order {}: expected {} of '{}', got {} of '{}'", rank_, which,
                     name(expected.pass), order.module_name(expected.use), name(pass), module_name(use));
  }
  /// The use that is recomputed before the backward of the use before `use`; none: none is.
  std::size_t first_before(std::size_t use) const {
    return order().ends_segment(use - 1) ? order().segment(use - 1) : none;
  }
  /// The next turn of the backward pass in progress, or the first one of the next backward pass.
  Turn next_backward() const {
    auto const again = pass_ == Pass::forward ? first_before(order().size()) : recompute_;
    if (again != none) return {Pass::recompute, again};
    return {Pass::backward, (pass_ == Pass::forward ? order().size() : next_) - 1};
  }
  Pass open_pass() const { return pass_ == Pass::backward && recompute_ != none ? Pass::recompute : pass_; }
  void expect_next(Pass pass, std::size_t use) const {
    if (open_) expect_closed(formatted("{} of '{}' begins", name(pass), module_name(use)));
  }
  /// The last use of the backward pass in progress, or of the next one.
  std::size_t pass_end() const { return activations_ ? 0 : order().backward_end(); }
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
  UseOrder const* now_ = nullptr;  ///< of the pass in progress, or of the last one; nullptr: the declared order
  Pass pass_ = Pass::idle;
  std::size_t next_ = 0;          ///< forward: uses done; backward: uses still to do
  std::size_t recompute_ = none;  ///< backward: the use that is recomputed next; none: the next turn is a backward
  std::size_t turns_ = 0;         ///< complete turns of the pass in progress
  std::size_t current_ = 0;       ///< the use under way while open_, in the declared order
  bool open_ = false;
  bool broken_ = false;
  bool activations_ = false;  ///< the backward pass under way writes no gradients
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
