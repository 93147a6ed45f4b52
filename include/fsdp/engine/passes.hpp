// SPDX-License-Identifier: Apache-2.0
// Forward and backward passes over the declared uses: what each gathers, keeps, drops and reduces.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/concepts.hpp"
#include "fsdp/engine/declaration.hpp"
#include "fsdp/engine/flat_param.hpp"
#include "fsdp/engine/history.hpp"
#include "fsdp/engine/reducer.hpp"
#include "fsdp/engine/stream_failures.hpp"
#include "fsdp/engine/unsharder.hpp"
#include "fsdp/error.hpp"
#include "fsdp/step/program.hpp"
#include "fsdp/step/schedule.hpp"

namespace fsdp {

/// The state of an engine's passes. Everything it refers to belongs to the engine.
template <Communicator C, class P>
class Passes {
 public:
  using D = typename C::Device;
  using Stream = typename D::Stream;
  using Unit = FlatParam<D, P>;
  using Failures = detail::StreamFailures<Stream, Unsharder<C, P>, Reducer<C, P>>;

  Passes(D const& device, int rank, Declaration<D, P>& declared, Unsharder<C, P>& gather, Reducer<C, P>& reduce,
         Stream& compute, History& history, Failures& failures)
      : device_(device),
        rank_(rank),
        declared_(&declared),
        gather_(&gather),
        reduce_(&reduce),
        compute_(&compute),
        history_(&history),
        failures_(&failures) {
    for (int pass = 0; pass < declared.options().passes_ahead; ++pass) begun_.push_back(device_.make_event());
  }

  /// What is done at each use, which the engine compiles when it is sealed.
  void set_program(Program const& program) { program_ = &program; }
  /// Flags of the next backward pass to begin.
  BackwardFlags next_backward() const { return {open_[0] == 0, open_[1] == 0, open_[2] == 0}; }
  /// A scope begins (1) or ends (-1).
  void add_scope(BackwardChange change, int by) { open_[static_cast<std::size_t>(change)] += by; }
  /// Inside, forward passes keep nothing for a backward pass. Scopes of it nest. A pass under way is forgotten.
  void begin_evaluation() {
    expect_whole_parameters("an evaluation begins");
    abandon("an evaluation begins");
    ++evaluations_;
  }
  void end_evaluation() noexcept {
    interrupt();
    --evaluations_;
  }

  /// A use begins. @throws what ends the pass: see interrupt()
  Unit& begin_forward(std::size_t use) {
    if (schedule().in_backward() || !writing_.empty()) {
      auto const what = formatted("forward of '{}' begins", schedule().module_name(use));
      expect_whole_gradients(what);
      expect_whole_parameters(what);
    }
    bool const starts = schedule().begin_forward(use);
    return or_interrupt([&]() -> Unit& {
      if (starts) {
        bound_ahead();
        facts_ = left_;
        if ((facts_ & starts_sharded) != 0) reshard_all();
        forget_parameters();
        phase_ = evaluating() ? Phase::evaluation : Phase::forward;
      }
      run(program_->turn(phase_, use).before, "forward");
      return unit_of(use);
    });
  }

  void end_forward(std::size_t use) {
    or_interrupt([&] {
      run(program_->turn(phase_, use).after, "forward");
      schedule().end_forward(use);
    });
  }

  Unit& begin_backward(std::size_t use) {
    FSDP_EXPECTS(!evaluating(),
                 "rank {}: backward of '{}' was called inside an evaluation; end the evaluation scope first", rank_,
                 schedule().module_name(use));
    if (schedule().backward_broken())
      expect_whole_gradients(formatted("backward of '{}' begins", schedule().module_name(use)));
    bool const starts = schedule().begin_backward(use);
    return or_interrupt([&]() -> Unit& {
      if (starts) {
        bound_ahead();
        facts_ = next_backward().facts() | (left_ & waiting_answers);
        phase_ = Phase::backward;
        ++backward_passes_;
      }
      run(program_->turn(phase_, use).before, "backward");
      return unit_of(use);
    });
  }

  void end_backward(std::size_t use) {
    or_interrupt([&] {
      run(program_->turn(phase_, use).after, "backward");
      if (!schedule().end_backward(use)) return;
      left_ = left_by(facts_);
      // Replicas make no collective in such a micro-step: only their histories tell how many they have made.
      if ((facts_ & syncs_all) == 0) history_->add("unreduced micro-step");
    });
  }

  /// Forgets a forward pass under way: every unit is dropped, the next use starts a new one.
  /// @throws UsageError inside a use, or in the middle of a backward pass
  /// @param what  forgets it, for the message
  void abandon(std::string_view what) {
    expect_whole_gradients(what);
    schedule().expect_closed(what);
    drop_pass();
  }
  /// Ends the pass under way after an exception: every unit is dropped as far as streams still take work. Gradients of
  /// a backward pass are then left half-way: all but discard() is refused.
  void interrupt() noexcept {
    schedule().interrupt();
    forget_parameters();
    for (auto& unit : declared_->units()) {
      try {
        gather_->reshard(*unit, *compute_);
      } catch (...) {  // of a stream that has failed: nothing that it was given will run
      }
    }
  }
  /// @throws UsageError if an optimizer step has ended half-way: to forget its gradients does not mend the parameters
  void expect_no_half_step(std::string_view what) const {
    if (writing_ == half_step) refuse_half_parameters(what);
  }
  /// Forgets all gradients, and a pass that is left half-way. Gradients of earlier passes may be discarded inside a
  /// forward use, and between a forward pass and its backward: these go on.
  void discard() {
    bool const in_backward = schedule().in_backward();
    if (in_backward) schedule().expect_closed("gradients are discarded");
    reduce_->discard(declared_->units(), *compute_);
    left_ = (left_ & start_answers) | nothing_waits;
    if (in_backward || (schedule().in_forward() && !schedule().is_open())) drop_pass();
  }

  typename Declaration<D, P>::Units const& units() const { return declared_->units(); }
  /// Backward passes begun so far: tells gradients apart.
  std::uint64_t backward_passes() const { return backward_passes_; }

  static constexpr std::string_view half_step = "an optimizer step";
  /// Master shards are about to be written, unit by unit. Until end_writing() the parameters are not whole.
  /// @param what  writes them, a literal: half_step, "an import"
  void begin_writing(std::string_view what) { writing_ = what; }
  void end_writing() { writing_ = {}; }

  /// @throws UsageError inside a use or an evaluation, or while parameters are written
  /// @param what  reads all parameters, for the message
  void expect_at_rest(std::string_view what) const {
    declared_->schedule().expect_closed(what);
    FSDP_EXPECTS(!evaluating(), "rank {}: {} inside an evaluation; end the evaluation scope first", rank_, what);
    expect_whole_parameters(what);
  }
  /// @throws UsageError if an optimizer step, an import or a load has ended half-way
  /// @param what  does not go with it, for the message
  void expect_whole_parameters(std::string_view what) const {
    if (!writing_.empty()) refuse_half_parameters(what);
  }
  /// @throws UsageError if a backward pass is left half-way, naming its units
  /// @param what  does not go with it, for the message
  void expect_whole_gradients(std::string_view what) const {
    if (declared_->schedule().in_backward()) refuse_half_gradients(what);
  }

 private:
  [[noreturn, gnu::cold]] void refuse_half_parameters(std::string_view what) const {
    std::string done, missing;
    for (auto const& unit : declared_->units()) {
      if (unit->empty()) continue;
      auto& list = unit->fresh ? done : missing;
      list += formatted("{}'{}'", list.empty() ? "" : ", ", unit->name());
    }
    auto const units = writing_ != half_step
                           ? std::string()
                           : formatted(": units updated: {}; not updated: {}", done.empty() ? "none" : done,
                                       missing.empty() ? "none" : missing);
    fail<UsageError>("rank {}: {}, but {} is incomplete{}. Load a checkpoint, or import all parameters, on all ranks",
                     rank_, what, writing_, units);
  }
  [[noreturn, gnu::cold]] void refuse_half_gradients(std::string_view what) const {
    auto const& schedule = declared_->schedule();
    schedule.expect_closed(what);
    std::string done, missing;
    for (auto use = schedule.size(); use-- > 0;) {
      if (!schedule.first_use_of_unit(use)) continue;
      auto& list = schedule.backward_done(use) ? done : missing;
      list += formatted("{}'{}'", list.empty() ? "" : ", ", declared_->units()[schedule.unit(use)]->name());
    }
    fail<UsageError>(
        "rank {}: {}, but {}: units that have their gradients: {}; units without: {}. {}discard_gradients()", rank_,
        what,
        schedule.backward_broken() ? "an exception has interrupted a backward pass" : "a backward pass is incomplete",
        done.empty() ? "none" : done, missing.empty() ? "none" : missing,
        schedule.backward_broken() ? "Call " : "Complete it, or call ");
  }

  Schedule& schedule() { return declared_->schedule(); }
  bool evaluating() const { return evaluations_ > 0; }

  /// Calls `act`; an exception ends the pass under way.
  template <class Act>
  decltype(auto) or_interrupt(Act const& act) {
    try {
      return act();
    } catch (PeerError const&) {
      interrupt();
      failures_->raise_cause();
      throw;
    } catch (...) {
      interrupt();
      throw;
    }
  }
  /// [Note: How far the host runs ahead] A pass begins: waits until all passes but the latest `passes_ahead` are
  /// complete, so that what is enqueued and not yet done stays bounded, evaluation without any optimizer step included.
  /// Other streams are bounded with compute, which waits for what they gather, and for the slots that they reduce.
  void bound_ahead() {
    auto& begun = begun_[passes_ % begun_.size()];
    if (passes_ >= begun_.size()) device_.synchronize(begun);
    ++passes_;
    device_.record(begun, *compute_);
  }
  Unit& unit_of(std::size_t use) { return *declared_->units()[schedule().unit(use)]; }

  /// Does what the program says.
  void run(std::vector<Operation> const& operations, std::string_view pass) {
    for (auto const& operation : operations)
      if (operation.runs(facts_)) run(operation, pass);
  }
  void run(Operation const& operation, std::string_view pass) {
    auto& unit = *declared_->units()[operation.unit];
    switch (operation.action) {
      case Action::gather: return gather_->unshard(unit, gather_->pool()[operation.slot], pass);
      case Action::gather_slices: return gather_->unshard_slices(unit, gather_->pool()[operation.slot], pass);
      case Action::await: return gather_->wait_for_unshard(unit, *compute_);
      case Action::keep_slice: return gather_->keep_slice(unit, gather_->kept_pool()[operation.slot], *compute_);
      case Action::drop: return gather_->drop(unit, *compute_);
      case Action::drop_slice: return gather_->drop_slice(unit);
      case Action::lease:
        if (operation.slot == Operation::no_slot) return reduce_->lease_direct(unit, *compute_);
        return reduce_->lease(unit, reduce_->pool()[operation.slot], *compute_);
      case Action::hold: return reduce_->hold(unit, *compute_);
      case Action::add_held: return reduce_->add_held(unit, *compute_);
      case Action::reduce_group: return reduce_->reduce(unit, operation.slot, *compute_, false);
      case Action::reduce: return reduce_->reduce(unit, operation.slot, *compute_, true);
      case Action::end_gradients: return reduce_->end_direct(unit, *compute_);
      case Action::await_gradients: return reduce_->await_direct(unit);
      case Action::all_reduce: return reduce_->all_reduce(unit, *program_, operation.slot);
      case Action::complete: return reduce_->complete_direct(unit);
      case Action::settle:
        if (operation.slot == Operation::no_slot) return reduce_->settle_accumulator(unit);
        return reduce_->settle(reduce_->pool()[operation.slot]);
      case Action::settle_wire: return reduce_->settle(reduce_->wires()[operation.slot]);
    }
  }
  /// The next forward pass finds no parameters of an earlier backward.
  void forget_parameters() noexcept { left_ = starts_sharded | (left_ & waiting_answers); }
  void drop_pass() {
    schedule().reset();
    reshard_all();
  }
  void reshard_all() {
    for (auto& unit : declared_->units()) gather_->reshard(*unit, *compute_);
    forget_parameters();
  }

  D device_;
  int rank_;
  Declaration<D, P>* declared_;
  Unsharder<C, P>* gather_;
  Reducer<C, P>* reduce_;
  Stream* compute_;
  History* history_;
  Failures* failures_;
  Program const* program_ = nullptr;
  std::array<int, 3> open_{};             ///< scopes by BackwardChange
  Phase phase_ = Phase::forward;          ///< of the pass under way
  Facts facts_ = plain_step;              ///< and of it
  Facts left_ = left_by(plain_step);      ///< by whole passes before it
  int evaluations_ = 0;                   ///< scopes that are open
  std::string_view writing_;              ///< what writes master shards; empty: nothing
  std::vector<typename D::Event> begun_;  ///< compute has come to the beginning of each of the latest passes
  std::size_t passes_ = 0;
  std::uint64_t backward_passes_ = 0;
};

}  // namespace fsdp
