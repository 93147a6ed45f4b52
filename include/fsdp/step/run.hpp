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
#include "fsdp/step/passes.hpp"
#include "fsdp/step/program.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::step {

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

/// A performer that shows each operation to a visitor.
class Visiting {
 public:
  void begin_pass(Position const&) {}
  /// A visitor that throws is not called again.
  void perform(Operation const& operation, Position const& at, Contents const& contents) {
    if (std::exchange(stopped_, true)) return;
    visit(operation, at, contents);
    stopped_ = false;
  }
  void begin_compute(Program::Turn const&) {}
  void computed(Operation const& operation, Position const& at, Contents const& contents) {
    perform(operation, at, contents);
  }
  void interrupted(Program::Turn const&) {}
  void end_pass(Position const&) {}

 protected:
  Visiting() = default;
  Visiting(Visiting const&) = default;
  ~Visiting() = default;

 private:
  /// Called for each operation of the run. @param contents  before it
  virtual void visit(Operation const& operation, Position const& at, Contents const& contents) = 0;

  bool stopped_ = false;
};

/// The operations of a run, in the order in which an engine enqueues them. All ranks enqueue the same.
class BasicRun : public Visiting, public Passes<Visiting> {
 public:
  /// Zeroes all gradient slots, as an engine does after it has placed the buffers.
  [[gnu::cold]] void prepare() { Passes::prepare(program()); }
  /// Passes that begin now follow the path, until the next call: see [Note: Paths].
  void follow(std::size_t path) { path_.path = path; }
  /// @param place  of the use in the path that is followed
  [[gnu::cold]] void forward(std::size_t place) {
    forward(program().turns(Phase::forward, in_forward() ? at().path : path_.path)[place]);
  }
  /// @param flags       of the pass; looked at when it begins
  /// @param recomputes  the use is recomputed
  [[gnu::cold]] void backward(std::size_t place, BackwardFlags flags, bool recomputes = false) {
    backward(program().turn(Phase::backward, place, recomputes, at().path), flags);
  }
  /// Runs a backward use of a pass without gradients. @param reshard  false: parameters stay unsharded
  [[gnu::cold]] void activations(std::size_t place, bool reshard, bool recomputes = false) {
    backward(program().turn(Phase::activations, place, recomputes, at().path), {.reshard = reshard}, true);
  }
  /// Measures the gradient norm.
  [[gnu::cold]] void norm() {
    complete_gradients();
    for (auto const& operation : program().norms)
      if (operation.size > 0 && has_gradient(operation.unit)) run(operation);
  }
  /// Updates all units that have a gradient.
  [[gnu::cold]] void update() {
    abandon("an optimizer step begins");
    complete_gradients();
    begin_updates();
    program().for_each_update(
        [this](Operation const& operation) {
          if (operation.primitive != Primitive::update) return run(operation);
          Visiting::perform(operation, at(), contents());
          note_update(operation);
        },
        [this](std::size_t unit) { return has_gradient(unit); });
    count_step();
  }

  /// Runs a forward and a backward pass.
  [[gnu::cold]] void micro_step(BackwardFlags flags = {}) {
    forward();
    for (auto const& turn : program().turns(Phase::backward, path_.path)) backward(turn, flags);
  }
  /// Runs a forward pass, and a backward pass through the activations alone; nothing if the program has no such pass.
  [[gnu::cold]] void frozen_micro_step(bool reshard = true) {
    if (program().turns(Phase::activations, path_.path).empty()) return;
    forward();
    for (auto const& turn : program().turns(Phase::activations, path_.path)) backward(turn, {.reshard = reshard}, true);
  }
  [[gnu::cold]] void evaluation() {
    begin_evaluation();
    forward();
    abandon("an evaluation ends");  // here, the visitor may throw
    end_evaluation();
  }
  /// Number of uses of a forward pass that begins now.
  std::size_t uses() const { return program().uses(path_.path); }

 protected:
  /// @param program  must outlive the run
  [[gnu::cold]] explicit BasicRun(Program const& program) : Passes(static_cast<Visiting&>(*this)) {
    set_program(program);
    followed() = &path_;
  }
  ~BasicRun() = default;

 private:
  [[gnu::cold]] void forward() {
    for (auto const& turn : program().turns(Phase::forward, path_.path)) forward(turn);
  }
  [[gnu::cold]] void forward(Program::Turn const& turn) {
    begin_use(UseKind::forward, turn.use);
    end_use();
  }
  [[gnu::cold]] void backward(Program::Turn const& turn, BackwardFlags flags, bool frozen = false) {
    set_scopes(flags, frozen);
    if (begin_use(turn.recomputes() ? UseKind::recompute : UseKind::backward, turn.use) != nullptr) end_use();
  }

  FollowedPath path_;
};

/// Calls a function for each operation of a run.
/// @tparam Visit  called as visit(Operation const&, Position const&, Contents const&), as Visiting::visit
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
