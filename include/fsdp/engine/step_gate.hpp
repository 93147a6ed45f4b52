// SPDX-License-Identifier: Apache-2.0
// Checks before an optimizer step, a norm or an export: are the gradients complete? Enqueues nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "fsdp/error.hpp"
#include "fsdp/step/contents.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail {

/// Checks before a step, a norm or an export. Optimizers, clip_grad_norm and exports call it before they begin. A call
/// that throws has changed nothing.
/// @tparam Passes  Passes of an engine, which must outlive it
template <class Passes>
class StepGate {
 public:
  StepGate(int rank, Passes& passes) : rank_(rank), passes_(&passes) {}

  /// @throws UsageError unless every unit has reduced gradients of whole backward passes since the last optimizer step;
  /// if EngineOptions::without_gradient allows it, unless some unit has and none has unreduced ones
  /// @param what  the refused action, for the message
  [[gnu::noinline]] void expect_reduced(std::string_view what) const {
    passes_->expect_whole_gradients(what);
    passes_->expect_whole_parameters(what);
    expect_units();
    bool const some = some_reduced();
    auto const waits = [&](std::size_t u) { return passes_->sealed() && passes_->contents()[u].waits(); };
    auto const count = passes_->units().size();
    for (std::size_t i = 0; i < 2 * count; ++i) {  // first those whose gradients wait
      auto const u = i % count;
      auto const& unit = *passes_->units()[u];
      if (waits(u) != (i < count) || (i >= count && some && passes_->allows_absent())) continue;
      FSDP_EXPECTS(passes_->sealed() && (!unit.trains() || passes_->contents()[u].is_reduced()),
                   "rank {}: {}, but unit '{}' has no reduced gradients{}", rank_, what, unit.name(),
                   waits(u) ? ": they were accumulated without reduction; run the last backward pass "
                              "outside no_sync() and no_replica_sync(), in a path that has the unit"
                   : some && passes_->has_paths()
                       ? ": all backward passes since the last step followed paths that leave it out; choose "
                         "EngineOptions::without_gradient"
                   : passes_->freezes_parameters()
                       ? ": the last backward pass was inside frozen_parameters(), where it writes none"
                       : ": no backward pass since the last step or discard_gradients()");
    }
  }
  /// @throws UsageError unless every gradient shard holds the reduced gradients of some backward pass, which an
  /// optimizer may have used already
  void expect_readable(std::string_view what) const {
    passes_->expect_whole_gradients(what);
    expect_units();
    bool some = false;
    for (std::size_t u = 0; passes_->sealed() && u < passes_->units().size(); ++u)
      some = some || (passes_->units()[u]->trains() && passes_->contents()[u].is_readable());
    for (std::size_t u = 0; u < passes_->units().size(); ++u) {
      if (some && passes_->has_paths() && !passes_->contents()[u].waits()) continue;
      FSDP_EXPECTS(
          passes_->sealed() && (!passes_->units()[u]->trains() || passes_->contents()[u].is_readable()),
          "rank {}: {}, but unit '{}' has no reduced gradients; complete a backward pass that reduces them first",
          rank_, what, passes_->units()[u]->name());
    }
  }
  /// See Passes::has_gradient. @pre sealed
  bool has_gradient(std::size_t unit) const { return passes_->has_gradient(unit); }
  bool exports_gradient(std::size_t unit) const { return passes_->exports_gradient(unit); }
  void complete_gradients() const { passes_->complete_gradients(); }

  /// @throws UsageError inside a use or an evaluation, or while parameters are not whole
  /// @param what  the refused action, for the message
  void expect_at_rest(std::string_view what) const { passes_->expect_at_rest(what); }

  /// Begins an optimizer step: drops units that were gathered before it.
  /// @param measurement  of the norm whose factor it takes; 0: it takes none
  /// @throws UsageError if gradients are missing, the norm is not that of these gradients, or one that was to be
  /// limited is left out
  [[gnu::noinline]] void begin_step(std::uint64_t measurement) {
    expect_reduced("an optimizer step begins");
    expect_norm(measurement);
    expect_not_swapped("an optimizer step begins");
    passes_->abandon("an optimizer step begins");
    passes_->complete_gradients();
    forget_norm();
    stepped_with_ = measurement;
  }
  /// Begins the updates of units. The step ends when all are updated; until then all but a load or an import is
  /// refused.
  void begin_updates() { to_update_ = passes_->begin_updates(); }
  /// @throws UsageError unless a step is under way in which the unit was not updated
  [[gnu::noinline]] void expect_update(std::size_t unit) const {
    auto const& updated = *passes_->units()[unit];
    FSDP_EXPECTS(to_update_ > 0, "rank {}: update of unit '{}' outside a step; call begin_step first", rank_,
                 updated.name());
    FSDP_EXPECTS(!updated.frozen, "rank {}: update of unit '{}', which is frozen", rank_, updated.name());
    FSDP_EXPECTS(updated.empty() || passes_->contents()[unit].gradient == step::Contents::Gradient::sum,
                 "rank {}: unit '{}' was already updated in this step{}", rank_, updated.name(),
                 passes_->has_paths() ? ", or has no gradient: see Shards::has_gradient" : "");
  }
  /// Counts a unit whose parameters have been updated.
  void updated() {
    if (to_update_ > 0 && --to_update_ == 0) passes_->end_writing();
  }
  /// Called before and after `what` replaces the shards.
  void begin_replacing(std::string_view what) {
    expect_not_swapped(what);
    to_update_ = 0;
    passes_->begin_writing(what);
  }
  void end_replacing() { passes_->end_writing(); }

  /// Records that averages replace the parameters of all units for a while: only evaluations and exports are allowed.
  void set_swapped(bool swapped) { passes_->set_swapped(swapped); }
  /// @throws UsageError while averages are in place
  void expect_not_swapped(std::string_view what) const { passes_->expect_not_swapped(what); }

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
  /// @throws UsageError as begin_step does for its norm
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
  bool some_reduced() const {
    for (std::size_t u = 0; passes_->sealed() && u < passes_->units().size(); ++u)
      if (passes_->units()[u]->trains() && passes_->contents()[u].is_reduced()) return true;
    return false;
  }
  void expect_units() const {
    FSDP_EXPECTS(!passes_->units().empty(), "rank {}: the engine has no modules; add one with shard()", rank_);
  }
  struct Norm {
    std::uint64_t measurement = 0;  ///< 0: none
    std::uint64_t of_pass = 0;      ///< the backward pass after which it was measured, counted from 1
    bool limits = false;
  };

  int rank_;
  Passes* passes_;
  Norm norm_;  ///< for the next step
  std::uint64_t measurements_ = 0;
  std::uint64_t stepped_with_ = 0;  ///< measurement that the last step took; 0: none
  std::size_t to_update_ = 0;       ///< units that the step under way has not updated
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail
