// SPDX-License-Identifier: Apache-2.0
// Forward and backward passes over the declared uses: runs the operations of the program at each use.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/concepts.hpp"
#include "fsdp/engine/declaration.hpp"
#include "fsdp/engine/executor.hpp"
#include "fsdp/engine/flat_param.hpp"
#include "fsdp/engine/half_states.hpp"
#include "fsdp/engine/history.hpp"
#include "fsdp/engine/open_accesses.hpp"
#include "fsdp/engine/stream_failures.hpp"
#include "fsdp/engine_options.hpp"
#include "fsdp/error.hpp"
#include "fsdp/fixed_array.hpp"
#include "fsdp/step/program.hpp"
#include "fsdp/step/run.hpp"
#include "fsdp/step/schedule.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail {

/// The state of an engine's passes. Everything it refers to belongs to the engine.
template <Communicator C, class P>
class Passes {
 public:
  using D = typename C::Device;
  using Stream = typename D::Stream;
  using Unit = FlatParam<P>;

  Passes(D const& device, int rank, Declaration<P>& declared, Executor<C, P>& executor, Stream& compute,
         History& history, StreamFailures<D>& failures, OpenAccesses const& accesses)
      : device_(device),
        rank_(rank),
        declared_(&declared),
        executor_(&executor),
        compute_(&compute),
        history_(&history),
        failures_(&failures),
        accesses_(&accesses) {
    for (int pass = 0; pass < declared.options().passes_ahead; ++pass) begun_.push_back(device_.make_event());
  }

  void set_program(Program const& program) { program_ = &program; }  ///< sealing is complete
  /// Flags for the next backward pass.
  BackwardFlags next_backward() const { return {open_[0] == 0, open_[1] == 0, open_[2] == 0}; }
  /// Whether the pass in progress is a backward pass that writes no gradients of parameters.
  bool freezes_parameters() const { return phase_ == Phase::activations; }
  /// Counts scopes: one begins (1) or ends (-1).
  void add_scope(BackwardChange change, int by) { open_[static_cast<std::size_t>(change)] += by; }
  /// Passes may follow another path from now on.
  /// @throws UsageError in the middle of a pass
  [[gnu::cold]] void expect_between_passes() {
    constexpr std::string_view what = "a path is followed";
    schedule().expect_closed(what);
    expect_whole_gradients(what);
    FSDP_EXPECTS(!schedule().in_forward(),
                 "rank {}: {}, but a forward pass is incomplete. Complete it ('{}' comes next), or call "
                 "discard_gradients()",
                 rank_, what, schedule().next_module());
  }
  /// Scopes of paths, the newest first: passes that begin follow its path. The caller owns them.
  FollowedPath*& followed() { return followed_; }
  /// Begins an evaluation. Forward keeps nothing for backward. Evaluations nest. A forward pass in progress is dropped.
  void begin_evaluation() {
    expect_whole_parameters("an evaluation begins");
    abandon("an evaluation begins");
    ++evaluations_;
  }
  void end_evaluation() noexcept {
    --evaluations_;
    cut("an evaluation ended");
  }
  /// Drops the pass in progress, because a scope that it needs ends. If a use is open, its end drops the pass, and
  /// throws.
  /// @param why  a literal, for the message
  void cut(std::string_view why) noexcept {
    if (!schedule().is_open()) return interrupt();
    cut_ = why;
  }

  /// Begins a forward use. An exception in it ends the pass: see interrupt()
  Unit& begin_forward(std::size_t use) {
    if (schedule().in_backward() || !writing_.empty()) {
      auto const what = formatted("forward of '{}' begins", schedule().module_name(use));
      expect_whole_gradients(what);
      expect_whole_parameters(what);
    }
    accesses_->expect_none("forward", schedule().module_name(use), "begins");
    auto const followed = followed_ == nullptr ? 0 : followed_->path;
    bool const starts = schedule().begin_forward(use, followed == 0 ? nullptr : declared_->paths()->order(followed));
    return or_interrupt([&]() -> Unit& {
      if (starts) {
        bound_ahead();
        if (path_ != followed) change_path(followed);
        if (flags_.begin_forward()) executor_->drop_parameters();
        executor_->begin_pass(flags_.now());
        phase_ = evaluating() ? Phase::evaluation : Phase::forward;
      }
      return begin("forward");
    });
  }

  void end_forward(std::size_t use) {
    or_interrupt([&] {
      end("forward", use);
      schedule().end_forward(use);
    });
  }

  /// See Schedule::skips_backward. @throws UsageError also if no unit of the pass's path trains
  bool skips_backward(Pass pass, std::size_t use) const {
    auto const& schedule = declared_->schedule();
    auto const& order = schedule.order();
    if (order.backward_end() == order.size() && order.size() > 0) {
      if (schedule.in_backward() || open_[static_cast<std::size_t>(BackwardChange::frozen_parameters)] > 0)
        return false;
      fail<UsageError>("rank {}: {} of '{}': nothing trains in path '{}', so its passes have no backward", rank_,
                       name(pass), schedule.module_name(use), order.path());
    }
    return schedule.skips_backward(pass, use);
  }
  /// @param pass  backward or recompute
  Unit& begin_backward(Pass pass, std::size_t use) {
    FSDP_EXPECTS(!evaluating(), "rank {}: {} of '{}' was called inside an evaluation; end the evaluation scope first",
                 rank_, name(pass), schedule().module_name(use));
    expect_not_swapped("a backward pass begins");
    if (schedule().backward_broken())
      expect_whole_gradients(formatted("{} of '{}' begins", name(pass), schedule().module_name(use)));
    accesses_->expect_none(name(pass), schedule().module_name(use), "begins");
    bool const activations = open_[static_cast<std::size_t>(BackwardChange::frozen_parameters)] > 0;
    bool const starts = schedule().begin_backward(pass, use, activations);
    return or_interrupt([&]() -> Unit& {
      if (starts) {
        bound_ahead();
        if (activations)
          flags_.begin_activations(next_backward());
        else
          flags_.begin_backward(next_backward()), ++backward_passes_;
        executor_->begin_pass(flags_.now());
        phase_ = activations ? Phase::activations : Phase::backward;
      }
      return begin("backward");
    });
  }

  void end_backward(std::size_t use) {
    or_interrupt([&] {
      end("backward", use);
      if (!schedule().end_backward(use)) return;
      if (freezes_parameters()) return flags_.end_activations(), history_->add("pass without gradients");
      flags_.end_backward();
      // Replicas make no collective in such a micro-step: only their histories tell how many they have made.
      if ((flags_.now() & syncs_all) == 0) history_->count("number of unreduced micro-steps");
    });
  }

  /// Drops a forward pass in progress: every unit is dropped, and the next use starts a new pass.
  /// @throws UsageError inside a use, or in the middle of a backward pass
  /// @param what  the refused action, for the message
  void abandon(std::string_view what) {
    expect_whole_gradients(what);
    schedule().expect_closed(what);
    drop_pass();
  }
  /// Ends the pass under way after an exception: every unit is dropped. Gradients of a backward pass are then left
  /// half-way: all but discard() is refused.
  [[gnu::cold, gnu::noinline]] void interrupt() noexcept {
    schedule().interrupt();
    cut_ = {};
    flags_.forget_parameters();
    executor_->drop_parameters();
  }
  /// @throws UsageError if an optimizer step has ended half-way: discarding gradients does not repair the parameters
  /// @param what  the refused action, for the message
  void expect_no_half_step(std::string_view what) const {
    if (writing_ == half_step) expect_whole_parameters(what);
  }
  /// Forgets all gradients, and a pass that is left half-way. Gradients of earlier passes may be discarded inside a
  /// forward use, and between a forward pass and its backward: these go on.
  void discard() {
    bool const in_backward = schedule().in_backward();
    if (in_backward) schedule().expect_closed("gradients are discarded");
    executor_->discard_gradients();
    flags_.forget_gradients();
    if (in_backward || (schedule().in_forward() && !schedule().is_open())) drop_pass();
  }

  typename Declaration<P>::Units const& units() const { return declared_->units(); }
  /// @pre sealed
  step::Contents const& contents() const { return executor_->contents(); }
  bool sealed() const { return program_ != nullptr; }  ///< there is a program
  /// Whether optimizer steps may find units without a gradient.
  bool allows_absent() const {
    return has_paths() && declared_->options().without_gradient != WithoutGradient::refused;
  }
  bool has_paths() const { return static_cast<bool>(declared_->paths()); }
  /// Whether the unit has a gradient for the next step. @pre sealed
  bool has_gradient(std::size_t unit) const {
    return units()[unit]->trains() && contents()[unit].gradient == step::Contents::Gradient::sum;
  }
  /// Whether the unit has a gradient for the next step, or, if no unit has, had one in the last step. @pre sealed
  bool exports_gradient(std::size_t unit) const {
    if (has_gradient(unit) || contents()[unit].gradient == step::Contents::Gradient::none) return has_gradient(unit);
    for (std::size_t u = 0; u < units().size(); ++u)
      if (has_gradient(u)) return false;
    return units()[unit]->trains() && (stepped_.empty() || stepped_[unit]);
  }
  /// With WithoutGradient::zeros, gives units without a gradient one of zeroes, if some unit has one. @note Stream: on
  /// compute
  void complete_gradients() {
    bool some = false;
    for (auto const& operation : program_->absent) some = some || has_gradient(operation.unit);
    for (auto const& operation : program_->absent)
      if (some) executor_->run(operation, "optimizer");
  }
  /// Begins an optimizer step. @return the number of units that it updates
  std::size_t begin_updates() {
    if (stepped_.empty()) stepped_ = FixedArray<bool>(units().size());
    std::size_t some = 0;
    for (std::size_t u = 0; u < stepped_.size(); ++u) some += (stepped_[u] = has_gradient(u)) ? 1u : 0u;
    begin_writing(half_step);
    return some;
  }
  std::uint64_t backward_passes() const { return backward_passes_; }  ///< begun so far: tells gradients apart

  static constexpr std::string_view half_step = "an optimizer step";
  /// Begins to write master shards, unit by unit. Until end_writing() the parameters are incomplete.
  /// @param what  the writer, a literal: half_step, "an import"
  void begin_writing(std::string_view what) { writing_ = what; }
  void end_writing() { writing_ = {}; }

  /// @throws UsageError inside a use or an evaluation, or while parameters are written
  /// @param what  the refused action, for the message
  void expect_at_rest(std::string_view what) const {
    declared_->schedule().expect_closed(what);
    FSDP_EXPECTS(!evaluating(), "rank {}: {} inside an evaluation; end the evaluation scope first", rank_, what);
    expect_whole_parameters(what);
  }
  void set_swapped(bool swapped) { swapped_ = swapped; }
  /// @throws UsageError while averages of weights are in the place of parameters: see Ema::swap
  void expect_not_swapped(std::string_view what) const {
    FSDP_EXPECTS(!swapped_, "rank {}: {}, but averages of weights are swapped in; end the scope of Ema::swap first",
                 rank_, what);
  }
  /// @throws UsageError if an optimizer step, an import or a load has ended half-way
  /// @param what  the refused action, for the message
  void expect_whole_parameters(std::string_view what) const {
    if (!writing_.empty())
      refuse_half_parameters(rank_, what, writing_, units(), contents(), writing_ == half_step ? &stepped_ : nullptr);
  }
  /// @throws UsageError if a backward pass is left half-way, naming its units
  /// @param what  the refused action, for the message
  void expect_whole_gradients(std::string_view what) const {
    if (declared_->schedule().in_backward()) refuse_half_gradients(rank_, what, *declared_, freezes_parameters());
  }

 private:
  Schedule& schedule() { return declared_->schedule(); }
  bool evaluating() const { return evaluations_ > 0; }

  /// Calls `act`; an exception ends the pass under way.
  template <class Act>
  decltype(auto) or_interrupt(Act const& act) {
    try {
      return act();
    } catch (...) {
      rethrow_interrupted();
    }
  }
  /// @pre called in a catch block
  [[noreturn, gnu::cold, gnu::noinline]] void rethrow_interrupted() {
    interrupt();
    try {
      throw;
    } catch (PeerError const&) {
      failures_->raise_cause();
      throw;
    }
  }
  /// [Note: How far the host runs ahead] At the start of a pass, the host waits until at most `passes_ahead` earlier
  /// passes are incomplete. This bounds the queues, also in evaluation. Compute waits for gathers and for free slots,
  /// so the other queues are bounded too.
  void bound_ahead() {
    auto& begun = begun_[passes_ % begun_.size()];
    if (passes_ >= begun_.size()) device_.synchronize(begun);
    device_.record(begun, *compute_);
    ++passes_;
  }

  /// Changes the path at the beginning of a pass. Parameters that the last pass left are dropped.
  [[gnu::cold]] void change_path(std::size_t path) {
    path_ = path;
    flags_.forget_parameters();
    history_->add(declared_->paths()->label(path_));
  }
  Program::Turn const& turn() { return program_->turns(phase_, path_)[schedule().turns_done()]; }
  /// Runs the operations of a turn before the module's kernels; end() runs those after them. @return the use's unit
  Unit& begin(std::string_view pass) {
    auto const& turn = this->turn();
    for (auto const& operation : turn.before)
      if (operation.runs(flags_.now())) executor_->run(operation, pass);
    executor_->begin_compute(turn);
    return *declared_->units()[turn.unit];
  }
  void end(std::string_view pass, std::size_t use) {
    executor_->end_compute();
    if (!cut_.empty()) refuse_cut_use(rank_, pass, schedule().module_name(use), cut_);
    accesses_->expect_none(pass, schedule().module_name(use), "ends");
    for (auto const& operation : turn().after)
      if (operation.runs(flags_.now())) executor_->run(operation, pass);
  }
  void drop_pass() {
    schedule().reset();
    executor_->drop_parameters();
    flags_.forget_parameters();
  }

  D device_;
  int rank_;
  Declaration<P>* declared_;
  Executor<C, P>* executor_;
  Stream* compute_;
  History* history_;
  StreamFailures<D>* failures_;
  OpenAccesses const* accesses_;
  Program const* program_ = nullptr;
  std::array<int, backward_changes> open_{};  ///< scopes by BackwardChange
  Phase phase_ = Phase::forward;              ///< of the pass in progress
  std::size_t path_ = 0;                      ///< of the pass in progress, or of the last one
  FollowedPath* followed_ = nullptr;          ///< nullptr: passes that begin follow the declared order
  FixedArray<bool> stepped_;                  ///< by unit: whether the last step updated it; empty: there was none
  step::PassFlags flags_;
  int evaluations_ = 0;                   ///< scopes that are open
  bool swapped_ = false;                  ///< averages are in the place of parameters
  std::string_view cut_;                  ///< why the end of the open use drops the pass; empty: it does not
  std::string_view writing_;              ///< the writer of master shards, for messages; empty: none
  std::vector<typename D::Event> begun_;  ///< compute has come to the beginning of each of the latest passes
  std::size_t passes_ = 0;
  std::uint64_t backward_passes_ = 0;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail
