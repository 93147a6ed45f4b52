// SPDX-License-Identifier: Apache-2.0
// Scopes of an engine: a use of a unit, an evaluation, a change of backward passes.
#pragma once

#include <cstddef>
#include <exception>
#include <utility>

#include "fsdp/engine/flat_param.hpp"
#include "fsdp/layout.hpp"
#include "fsdp/step/program.hpp"
#include "fsdp/step/schedule.hpp"
#include "fsdp/trace/trace.hpp"

namespace fsdp {

/// Forward passes during its lifetime keep nothing for a backward pass. Scopes nest. A forward pass in progress is
/// dropped when the scope begins and when it ends. The destructor throws a UsageError if another thread is inside a
/// call of the engine.
/// @tparam E  detail::EngineCore
template <class E>
class [[nodiscard]] EvaluationScope {
 public:
  /// @throws UsageError in the middle of a backward pass
  explicit EvaluationScope(E& engine) : engine_(&engine) {
    auto const turn = engine.calls.enter("evaluation");
    engine.passes.begin_evaluation();
  }
  EvaluationScope(EvaluationScope&& other) noexcept : engine_(std::exchange(other.engine_, nullptr)) {}
  EvaluationScope& operator=(EvaluationScope&&) = delete;
  ~EvaluationScope() noexcept(false) {
    if (engine_ == nullptr) return;
    bool const unwinds = std::uncaught_exceptions() != exceptions_;
    auto const turn = unwinds ? typename E::Calls::Turn() : engine_->calls.enter("the end of an evaluation");
    engine_->passes.end_evaluation();
  }

 private:
  E* engine_;
  int exceptions_ = std::uncaught_exceptions();
};

/// Changes the backward passes that begin during its lifetime. A pass that has begun does not change. Scopes nest.
/// @tparam E  detail::EngineCore
template <class E>
class [[nodiscard]] BackwardScope {
 public:
  /// @param on  false: the scope changes nothing
  BackwardScope(E& engine, BackwardChange change, bool on) : engine_(on ? &engine : nullptr), change_(change) {
    if (on) engine.begin_backward_scope(change);
  }
  BackwardScope(BackwardScope&& other) noexcept
      : engine_(std::exchange(other.engine_, nullptr)), change_(other.change_) {}
  BackwardScope& operator=(BackwardScope&&) = delete;
  ~BackwardScope() {
    if (engine_ != nullptr) engine_->end_backward_scope(change_);
  }

 private:
  E* engine_;
  BackwardChange change_;
};

template <class E>
class PathScope;  // fsdp/paths.hpp

/// One use of a unit. Its full parameters (and in backward its gradients) are valid during the scope's lifetime. An
/// exception that leaves the scope ends the pass. The destructor ends the use and throws if this fails, for example
/// with the exception of an earlier task.
/// @tparam E  detail::EngineCore
template <class E>
class [[nodiscard]] UseScope {
 public:
  [[gnu::noinline]] UseScope(E& engine, std::size_t use, Pass pass) : engine_(&engine), use_(use), pass_(pass) {
    auto const what = fsdp::name(pass);
    auto const turn = engine.calls.enter(what.data());
    bool const forward = pass == Pass::forward;
    if (!forward && engine.skips_backward(pass, use)) return;
    unit_ = &(forward ? engine.begin_forward(use) : engine.begin_backward(pass, use));
    try {
      for (std::size_t i = 0; i <= unit_->beside.size(); ++i) begin(unit(i));
      span_ = engine.trace.begin(*engine.compute, StreamKind::compute, unit_->name(), what,
                                 fsdp::name(forward ? Pass::forward : Pass::backward));
    } catch (...) {
      interrupt();
      throw;
    }
  }
  UseScope(UseScope const&) = delete;
  [[gnu::noinline]] ~UseScope() noexcept(false) {
    if (unit_ == nullptr) return;
    if (std::uncaught_exceptions() > exceptions_) {
      interrupt();
      return;
    }
    auto const turn = engine_->calls.enter(pass_ == Pass::forward    ? "the end of a forward"
                                           : pass_ == Pass::backward ? "the end of a backward"
                                                                     : "the end of a recompute");
    try {
      span_.end();
      for (std::size_t i = 0; i <= unit_->beside.size(); ++i) end(unit(i));
    } catch (...) {
      interrupt();
      throw;
    }
    auto& passes = engine_->passes;
    if (pass_ == Pass::forward) {
      passes.end_forward(use_);
    } else {
      passes.end_backward(use_);
    }
  }

  /// False if backward passes do not come to this use, because nothing at or below it trains: there are no parameters.
  explicit operator bool() const { return unit_ != nullptr; }
  /// The unit of a tensor: 0 is the unit that the use was declared with, others have tensors of other kinds.
  typename E::Unit& unit(std::size_t of = 0) const {
    return of == 0 ? *unit_ : engine_->declared.unit(unit_->index(), of);
  }
  // Of unit 0.
  typename E::Param const* parameters() const { return static_cast<typename E::Param const*>(unit_->use.parameters); }
  typename E::Reduce* gradients() const { return static_cast<typename E::Reduce*>(unit_->use.gradients); }
  FlatLayout const& layout() const { return unit_->layout(); }
  /// Gradients of the unit's tensors are wanted. @pre a backward use
  bool wants_gradients(typename E::Unit const& unit) const {
    return !unit.frozen && !engine_->passes.freezes_parameters();
  }
  /// The full parameters, and in backward gradients, of the unit. Gradients are nullptr if they are not wanted and no
  /// module writes them.
  UseBuffers const& buffers(std::size_t of = 0) const { return unit(of).use; }

 private:
  void begin(typename E::Unit& unit) {
    unit.use = {unit.full, pass_ == Pass::backward ? gradients_of(unit) : nullptr};
    engine_->guarded.begin(engine_->device, *engine_->compute, unit);
  }
  void end(typename E::Unit& unit) {
    engine_->guarded.end(engine_->device, *engine_->compute, unit, gradients_of(unit));
  }
  void* gradients_of(typename E::Unit const& unit) const {
    return wants_gradients(unit) ? unit.full_gradient : unit.scratch_gradient;
  }
  void interrupt() noexcept {
    for (std::size_t i = 0; i <= unit_->beside.size(); ++i)
      engine_->guarded.abandon(engine_->device, *engine_->compute, unit(i));
    engine_->passes.interrupt();
  }

  E* engine_;
  typename E::Unit* unit_ = nullptr;
  std::size_t use_;
  Pass pass_;
  typename TraceHook<typename E::Device>::Scope span_;
  int exceptions_ = std::uncaught_exceptions();
};

}  // namespace fsdp
