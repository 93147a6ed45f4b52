// SPDX-License-Identifier: Apache-2.0
// Runs a program without a device, call by call, for simulators, checks and the plan of events.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "fsdp/step/contents.hpp"
#include "fsdp/step/facts.hpp"
#include "fsdp/step/operation.hpp"
#include "fsdp/step/program.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::step {

/// Flags of the passes of a run, each of which depends on the one before.
class PassFlags {
 public:
  /// Flags of the pass in progress.
  Facts now() const { return now_; }
  /// Begins a forward pass. @return whether parameters left by earlier passes are dropped first
  bool begin_forward() {
    now_ = left_;
    forget_parameters();
    return (now_ & starts_sharded) != 0;
  }
  void begin_backward(BackwardFlags flags) { now_ = flags.facts() | (left_ & waiting_answers); }
  void end_backward() { left_ = left_by(now_); }
  /// Begins a pass that writes no gradients: those of earlier passes wait as before.
  void begin_activations(BackwardFlags flags) {
    now_ = (flags.facts() & drop_answers) | syncs_all | (left_ & waiting_answers);
  }
  void end_activations() { left_ = (left_by(now_) & start_answers) | (left_ & waiting_answers); }
  /// Records that the next forward pass finds no parameters of an earlier backward pass.
  void forget_parameters() { left_ = starts_sharded | (left_ & waiting_answers); }
  void forget_gradients() { left_ = (left_ & start_answers) | nothing_waits; }

 private:
  Facts now_ = plain_step;
  Facts left_ = left_by(plain_step);  ///< state that the last complete pass has left
};

/// The place of an operation in a run.
struct Position {
  static constexpr std::uint32_t no_use = ~0u;

  std::uint32_t step = 0;  ///< updates so far
  /// Number of the backward pass in the run, from 1; a forward pass has the number of the backward pass that follows.
  std::uint32_t micro_step = 0;
  std::uint32_t use = no_use;  ///< no_use: between uses
  Phase phase{};               ///< of the use
  Facts flags = plain_step;    ///< of the pass in progress, or of the last one
  std::uint32_t path = 0;      ///< of the pass in progress, or of the last one
  std::uint32_t place = 0;     ///< of the use in the path
};

/// An operation of a run, with `Mode::sum` resolved to `write` or `add`.
struct Executed {
  Operation operation;
  Position at;
};
/// @param contents  before the operation
inline Executed executed(Operation const& operation, Position const& at, Contents const& contents) {
  Executed result{operation, at};
  for (auto& access : result.operation.accesses())
    if (access.mode == Mode::sum) access.mode = contents.begins_sum(operation) ? Mode::write : Mode::add;
  return result;
}

/// A visitor of Run that appends to `list`, which must outlive it.
inline auto record_into(std::vector<Executed>& list) {
  return [&list](Operation const& operation, Position const& at, Contents const& contents) {
    list.push_back(executed(operation, at, contents));
  };
}

/// The operations of a run, in the order in which an engine enqueues them. All ranks enqueue the same.
class BasicRun {
 public:
  /// Zeroes all gradient slots, as an engine does after it has placed the buffers.
  [[gnu::cold]] void prepare() {
    for (std::uint32_t slot = 0; slot < program_->gradient_slots.size(); ++slot)
      execute(zeroing(*program_, slot, StreamKind::reduce));
  }
  /// Passes that begin now follow the path, until the next call: see [Note: Paths].
  void follow(std::size_t path) { path_ = path; }
  /// @param use  its place in the path that is followed
  [[gnu::cold]] void forward(std::size_t use) {
    if (use == 0) {
      if (at_.path != path_) flags_.forget_parameters();
      if (flags_.begin_forward()) drop_parameters();
      at_.path = static_cast<std::uint32_t>(path_);
      at_.phase = evaluations_ > 0 ? Phase::evaluation : Phase::forward;
      at_.flags = flags_.now();
      at_.micro_step = backwards_ + 1;
    }
    run(program_->turns(at_.phase, at_.path)[use]);
    pass_ = use + 1 == uses() ? Pass::idle : Pass::forward;
  }
  /// @param flags       of the pass; looked at when it begins
  /// @param recomputes  the use is recomputed
  [[gnu::cold]] void backward(std::size_t use, BackwardFlags flags, bool recomputes = false) {
    backward(program_->turn(Phase::backward, use, recomputes, at_.path), flags);
  }
  /// Runs a backward use of a pass without gradients. @param reshard  false: parameters stay unsharded
  [[gnu::cold]] void activations(std::size_t use, bool reshard, bool recomputes = false) {
    activations(program_->turn(Phase::activations, use, recomputes, at_.path), reshard);
  }
  [[gnu::cold]] void begin_evaluation() {
    abandon();
    ++evaluations_;
  }
  [[gnu::cold]] void end_evaluation() {
    abandon();
    --evaluations_;
  }
  /// Discards gradients, and a pass in progress.
  void discard() {
    contents_.discard_gradients([this](Operation const& operation) { execute(operation); });
    flags_.forget_gradients();
    if (std::exchange(pass_, Pass::idle) != Pass::idle) abandon();
  }
  /// Measures the gradient norm.
  [[gnu::cold]] void norm() {
    complete_gradients();
    for (auto const& operation : program_->norms)
      if (operation.size > 0 && has_gradient(operation.unit)) execute(operation);
  }
  /// Updates all units; of a program of several paths, those that have a gradient.
  [[gnu::cold]] void update() {
    abandon();
    complete_gradients();
    program_->for_each_update([this](Operation const& operation) { execute(operation); },
                              [this](std::size_t unit) { return has_gradient(unit); });
    ++at_.step;
  }

  /// Runs a forward and a backward pass.
  [[gnu::cold]] void micro_step(BackwardFlags flags = {}) {
    for (std::size_t use = 0; use < uses(); ++use) forward(use);
    for (auto const& turn : program_->turns(Phase::backward, path_)) backward(turn, flags);
  }
  /// Runs a forward pass, and a backward pass through the activations alone; nothing if the program has no such pass.
  [[gnu::cold]] void frozen_micro_step(bool reshard = true) {
    if (program_->turns(Phase::activations, path_).empty()) return;
    for (std::size_t use = 0; use < uses(); ++use) forward(use);
    for (auto const& turn : program_->turns(Phase::activations, path_)) activations(turn, reshard);
  }
  [[gnu::cold]] void evaluation() {
    begin_evaluation();
    for (std::size_t use = 0; use < uses(); ++use) forward(use);
    end_evaluation();
  }
  /// Number of uses of a forward pass that begins now.
  std::size_t uses() const { return program_->uses(path_); }

 protected:
  [[gnu::cold]] explicit BasicRun(Program const& program) : program_(&program), contents_(program) {}
  BasicRun(BasicRun const&) = default;
  BasicRun(BasicRun&&) = default;
  ~BasicRun() = default;

 private:
  /// Called for each operation of the run. @param contents  before it
  virtual void visit(Operation const& operation, Position const& at, Contents const& contents) = 0;

  enum class Pass : unsigned char { idle, forward, backward };

  [[gnu::cold, gnu::noinline]] void execute(Operation const& operation) {
    if (!contents_.runs(operation)) return;
    visit(operation, at_, contents_);
    contents_.apply(operation);
  }
  [[gnu::cold]] void backward(Program::Turn const& turn, BackwardFlags flags) {
    if (pass_ != Pass::backward) {
      flags_.begin_backward(flags);
      at_.flags = flags_.now();
      at_.phase = Phase::backward;
      at_.micro_step = backwards_ + 1;
    }
    run(turn);
    bool const ends = &turn == &program_->turns(Phase::backward, at_.path).back();
    pass_ = ends ? Pass::idle : Pass::backward;
    if (ends) flags_.end_backward(), ++backwards_;
  }
  [[gnu::cold]] void activations(Program::Turn const& turn, bool reshard) {
    if (pass_ != Pass::backward) {
      flags_.begin_activations({.reshard = reshard});
      at_.flags = flags_.now();
      at_.phase = Phase::activations;
    }
    run(turn);
    bool const ends = &turn == &program_->turns(Phase::activations, at_.path).back();
    pass_ = ends ? Pass::idle : Pass::backward;
    if (ends) flags_.end_activations();
  }
  [[gnu::cold]] void run(Program::Turn const& turn) {
    at_.use = turn.use;
    at_.place = turn.place;
    for (auto const& operation : turn.before)
      if (operation.runs(flags_.now())) execute(operation);
    execute(turn.compute);
    for (auto const& operation : turn.beside) execute(operation);
    for (auto const& operation : turn.after)
      if (operation.runs(flags_.now())) execute(operation);
    at_.use = Position::no_use;
  }
  void complete_gradients() {
    for (auto const& operation : program_->absent) execute(operation);
  }
  bool has_gradient(std::size_t unit) const {
    return program_->paths() == 1 || contents_[unit].gradient == Contents::Gradient::sum;
  }
  [[gnu::cold]] void drop_parameters() {
    contents_.drop_parameters([this](Operation const& operation) { execute(operation); });
  }
  /// Abandons a pass in progress, and parameters that one has left.
  [[gnu::cold]] void abandon() {
    pass_ = Pass::idle;
    drop_parameters();
    flags_.forget_parameters();
  }

  Program const* program_;
  Contents contents_;
  PassFlags flags_;
  Position at_;
  Pass pass_ = Pass::idle;
  std::size_t path_ = 0;  ///< for passes that begin
  std::uint32_t backwards_ = 0;
  int evaluations_ = 0;
};

/// Calls a function for each operation of a run.
/// @tparam Visit  called as visit(Operation const&, Position const&, Contents const&), as BasicRun::visit
template <class Visit>
class Run final : public BasicRun {
 public:
  Run(Program const& program, Visit visit) : BasicRun(program), visit_(std::move(visit)) {}

 private:
  void visit(Operation const& operation, Position const& at, Contents const& contents) override {
    visit_(operation, at, contents);
  }

  Visit visit_;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::step
