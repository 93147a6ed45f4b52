// SPDX-License-Identifier: Apache-2.0
// Whether gradients are what an optimizer step, a norm or an export takes them for. Nothing here moves or enqueues.
#pragma once

#include <cstdint>
#include <string_view>
#include <utility>

#include "fsdp/error.hpp"

namespace fsdp {

/// What optimizers, clip_grad_norm and exports ask before they begin: a call that is refused has changed nothing.
/// @tparam Passes  fsdp::Passes of an engine, which must outlive it
template <class Passes>
class StepGate {
 public:
  StepGate(int rank, Passes& passes) : rank_(rank), passes_(&passes) {}

  /// @throws UsageError unless every unit has reduced gradients of whole backward passes since the last optimizer step
  /// @param what  needs them, for the message
  void expect_reduced(std::string_view what) const {
    passes_->expect_whole_gradients(what);
    expect_units();
    for (auto const& unit : passes_->units())
      FSDP_EXPECTS(!unit->fresh && !unit->has_unreduced(), "rank {}: unit '{}' has no reduced gradients to step with{}",
                   rank_, unit->name(), unit->has_unreduced() ? ": they wait for a backward pass that reduces" : "");
  }
  /// @throws UsageError unless every gradient shard holds the reduced gradients of some backward pass, which an
  /// optimizer may have used already
  void expect_readable(std::string_view what) const {
    passes_->expect_whole_gradients(what);
    expect_units();
    for (auto const& unit : passes_->units())
      FSDP_EXPECTS(unit->reduced_once && !unit->has_unreduced(), "rank {}: {}, but unit '{}' has no reduced gradients",
                   rank_, what, unit->name());
  }

  /// An optimizer step begins: nothing that was gathered before it is used again.
  /// @return whether it multiplies gradients by the factor that clip_grad_norm has decided
  /// @throws UsageError if gradients are missing, or not those that clip_grad_norm has measured
  bool begin_step() {
    expect_reduced("an optimizer step begins");
    expect_current_norm();
    passes_->abandon("an optimizer step begins");
    return std::exchange(norm_, {}).of_pass == passes_->backward_passes();
  }

  /// clip_grad_norm has measured the gradients as they are: the next optimizer step takes the factor that it decided.
  /// @param limits  the factor may be other than 1
  void set_measured(bool limits) { norm_ = {passes_->backward_passes(), limits || (measured() && norm_.limits)}; }
  /// clip_grad_norm has measured the gradients, and they are still the same.
  bool measured() const { return norm_.of_pass == passes_->backward_passes(); }
  void forget_norm() { norm_ = {}; }
  /// @throws UsageError if gradients were to be clipped by a norm that was measured before another backward pass
  void expect_current_norm() const {
    FSDP_EXPECTS(
        measured() || !norm_.limits,
        "rank {}: an optimizer step begins, but the norm to clip by was measured before another backward pass: "
        "call clip_grad_norm after the last one",
        rank_);
  }

 private:
  void expect_units() const {
    FSDP_EXPECTS(!passes_->units().empty(), "rank {}: the engine has no modules", rank_);
  }
  struct Norm {
    std::uint64_t of_pass = 0;  ///< the backward pass after which it was measured, counted from 1
    bool limits = false;
  };

  int rank_;
  Passes* passes_;
  Norm norm_;
};

}  // namespace fsdp
