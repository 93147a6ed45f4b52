// SPDX-License-Identifier: Apache-2.0
// Checks before an optimizer step, a norm or an export: are the gradients complete, and is the norm theirs? Enqueues
// nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "fsdp/detail/step/contents.hpp"
#include "fsdp/detail/step/passes.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail {

/// Checks before a step, a norm or an export. A call that throws has changed nothing.
class GradientChecks {
 public:
  /// @param passes         must outlive the checks
  /// @param allows_absent  optimizer steps may find units without a gradient, in an engine of several paths
  GradientChecks(int rank, step::PassState const& passes, bool allows_absent)
      : rank_(rank), passes_(&passes), allows_absent_(allows_absent) {}

  // In the following, `what` is the refused action, for the message.

  /// @throws UsageError unless every unit has reduced gradients of whole backward passes since the last optimizer step;
  /// if EngineOptions::without_gradient allows it, unless some unit has and none has unreduced ones
  [[gnu::noinline]] void expect_reduced(std::string_view what) const {
    passes_->expect_whole_gradients(what);
    passes_->expect_whole_parameters(what);
    expect_sealed(what);
    auto const& units = passes_->program().units;
    bool some = false;
    for (std::size_t u = 0; u < units.size(); ++u) {
      some = some || (units[u].trains() && contents(u).is_reduced());
      if (units[u].trains() && contents(u).waits()) refuse_unreduced(what, u);
    }
    if (some && passes_->has_paths() && allows_absent_) return;
    for (std::size_t u = 0; u < units.size(); ++u)
      if (units[u].trains() && !contents(u).is_reduced()) refuse_absent(what, u, some);
  }
  /// @throws UsageError unless every gradient shard holds the reduced gradients of some backward pass, which an
  /// optimizer may have used already
  void expect_readable(std::string_view what) const {
    passes_->expect_whole_gradients(what);
    expect_sealed(what);
    auto const& units = passes_->program().units;
    bool some = false;
    for (std::size_t u = 0; u < units.size(); ++u) some = some || (units[u].trains() && contents(u).is_readable());
    for (std::size_t u = 0; u < units.size(); ++u) {
      if (some && passes_->has_paths() && !contents(u).waits()) continue;
      FSDP_EXPECTS(
          !units[u].trains() || contents(u).is_readable(),
          "rank {}: {}, but unit '{}' has no reduced gradients; complete a backward pass that reduces them first",
          rank_, what, units[u].name);
    }
  }
  /// @param measurement  of the norm whose factor an optimizer step takes; 0: it takes none
  /// @throws UsageError if gradients are missing, the norm is not that of these gradients, or one that was to be
  /// limited is left out
  [[gnu::noinline]] void expect_step(std::uint64_t measurement) const {
    expect_reduced("an optimizer step begins");
    expect_norm(measurement);
    passes_->expect_not_swapped("an optimizer step begins");
  }
  /// Records an optimizer step. @param measurement  of the norm that it takes; 0: none
  void set_stepped(std::uint64_t measurement) {
    forget_norm();
    stepped_with_ = measurement;
  }
  /// @return whether the last step took a norm, so that it may have been skipped
  /// @throws UsageError if that norm has been replaced
  bool last_step_measured(std::string_view what) const {
    FSDP_EXPECTS(stepped_with_ == 0 || is_last_measurement(stepped_with_),
                 "rank {}: {}: clip_grad_norm was called after the last step, so it is not known whether the step was "
                 "skipped; call it right after the step",
                 rank_, what);
    return stepped_with_ != 0;
  }

  /// Records that clip_grad_norm has measured the gradients. @return the measurement's number
  std::uint64_t set_measured(bool limits) {
    norm_ = {++measurements_, passes_->backward_passes(), limits || (measured() && norm_.limits)};
    return measurements_;
  }
  /// Whether clip_grad_norm has measured the gradients, and they have not changed since.
  bool measured() const { return norm_.of_pass == passes_->backward_passes(); }
  bool is_last_measurement(std::uint64_t measurement) const { return measurement == measurements_; }
  void forget_norm() { norm_ = {}; }
  /// @throws UsageError as expect_step does for its norm
  void expect_norm(std::uint64_t measurement) const {
    constexpr auto step = "an optimizer step begins";
    FSDP_EXPECTS(measured() || norm_.measurement == 0 || (measurement == 0 && !norm_.limits),
                 "rank {}: {}, but clip_grad_norm was called before the last backward pass; call it after the last one",
                 rank_, step);
    FSDP_EXPECTS(measurement != 0 || !norm_.limits,
                 "rank {}: {} without the norm that clip_grad_norm returned, so gradients would not be clipped; pass "
                 "it on: step(norm)",
                 rank_, step);
    FSDP_EXPECTS(measurement == 0 || measurement == norm_.measurement,
                 "rank {}: {} with an outdated norm: {}; call clip_grad_norm again", rank_, step,
                 measurement == measurements_ ? "a step has used it already, or its gradients were discarded"
                                              : "clip_grad_norm has been called again since");
  }

 private:
  struct Norm {
    std::uint64_t measurement = 0;  ///< 0: none
    std::uint64_t of_pass = 0;      ///< the backward pass after which it was measured, counted from 1
    bool limits = false;
  };

  step::Contents::UnitState const& contents(std::size_t unit) const { return passes_->contents()[unit]; }
  void expect_sealed(std::string_view what) const {
    if (!passes_->sealed()) refuse_unsealed(what);
  }
  /// No backward pass can have run.
  [[noreturn, gnu::cold]] void refuse_unsealed(std::string_view what) const {
    auto const& uses = *passes_->declared();
    FSDP_EXPECTS(uses.size() > 0, "rank {}: the engine has no modules; add one with shard()", rank_);
    fail<UsageError>("rank {}: {}, but module '{}' has no reduced gradients: no backward pass has run", rank_, what,
                     uses.module_name(0));
  }
  [[noreturn, gnu::cold]] void refuse_unreduced(std::string_view what, std::size_t unit) const {
    fail<UsageError>(
        "rank {}: {}, but unit '{}' has no reduced gradients: they were accumulated without reduction; run the last "
        "backward pass outside no_sync() and no_replica_sync(), in a path that has the unit",
        rank_, what, passes_->program().units[unit].name);
  }
  [[noreturn, gnu::cold]] void refuse_absent(std::string_view what, std::size_t unit, bool some) const {
    fail<UsageError>("rank {}: {}, but unit '{}' has no reduced gradients{}", rank_, what,
                     passes_->program().units[unit].name,
                     some && passes_->has_paths()
                         ? ": all backward passes since the last step followed paths that leave it out; choose "
                           "EngineOptions::without_gradient"
                     : passes_->freezes_parameters()
                         ? ": the last backward pass was inside frozen_parameters(), where it writes none"
                         : ": no backward pass since the last step or discard_gradients()");
  }

  int rank_;
  step::PassState const* passes_;
  bool allows_absent_;
  Norm norm_;  ///< for the next step
  std::uint64_t measurements_ = 0;
  std::uint64_t stepped_with_ = 0;  ///< measurement that the last step took; 0: none
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail
