// SPDX-License-Identifier: Apache-2.0
// Scopes of an engine: a use of a unit, an evaluation, a change of backward passes.
#pragma once

#include <cstddef>
#include <exception>
#include <utility>

#include "fsdp/engine/open_use.hpp"
#include "fsdp/step/program.hpp"
#include "fsdp/step/schedule.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// Evaluates: forward passes during its lifetime keep nothing for a backward pass. Scopes nest. A forward pass in
/// progress is dropped when the scope begins and when it ends. If it ends inside a use, the end of that use drops the
/// pass and throws a UsageError. The destructor throws a UsageError if another thread is inside a call of the engine.
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

/// A use of a unit, as a scope. Its full parameters (and in backward its gradients) are valid during the scope's
/// lifetime. An exception that leaves the scope ends the pass. The destructor ends the use and throws if this fails,
/// for example with the exception of an earlier task. It converts to false if backward passes do not come to
/// this use. HeldUse (fsdp/held_use.hpp) begins in one function and ends in another.
/// @tparam E  detail::EngineCore
template <class E>
class [[nodiscard]] UseScope : public detail::OpenUse<E> {
 public:
  using Core = E;

  UseScope(E& engine, std::size_t use, Pass pass) { this->begin_use(engine, use, pass); }
  UseScope(UseScope const&) = delete;
  ~UseScope() noexcept(false) {
    if (std::uncaught_exceptions() > exceptions_) {
      this->abandon_use();
    } else {
      this->end_use();
    }
  }

 private:
  int exceptions_ = std::uncaught_exceptions();
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
