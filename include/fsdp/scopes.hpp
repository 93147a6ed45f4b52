// SPDX-License-Identifier: Apache-2.0
// Scopes of an engine: a use of a unit, in one function or from one hook to another; an evaluation; a change of
// backward passes.
#pragma once

#include <cstddef>
#include <exception>
#include <utility>

#include "fsdp/detail/engine/flat_param.hpp"
#include "fsdp/detail/step/operation.hpp"
#include "fsdp/detail/step/program.hpp"
#include "fsdp/detail/trace/trace.hpp"
#include "fsdp/error.hpp"
#include "fsdp/layout.hpp"
#include "fsdp/options.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// Evaluates: forward passes during its lifetime keep nothing for a backward pass. Scopes nest. A forward pass in
/// progress is dropped when the scope begins and when it ends. If it ends inside a use, the end of that use drops the
/// pass and throws a UsageError. The destructor throws a UsageError if another thread is inside a call of the engine.
/// @tparam E  detail::EngineCore
template <class E>
class [[nodiscard]] EvaluationScope {
 public:
  /// @throws UsageError in the middle of a backward pass
  explicit EvaluationScope(E& engine);
  /// Moves the scope: the evaluation lasts until the new scope ends.
  EvaluationScope(EvaluationScope&& other) noexcept : engine_(std::exchange(other.engine_, nullptr)) {}
  EvaluationScope& operator=(EvaluationScope&&) = delete;
  ~EvaluationScope() noexcept(false);

 private:
  E* engine_;
  int exceptions_ = std::uncaught_exceptions();
};

template <class E>
EvaluationScope<E>::EvaluationScope(E& engine) : engine_(&engine) {
  auto const entry = engine.calls.enter("evaluation");
  engine.passes.begin_evaluation();
}

template <class E>
EvaluationScope<E>::~EvaluationScope() noexcept(false) {
  if (engine_ == nullptr) return;
  bool const unwinds = std::uncaught_exceptions() != exceptions_;
  auto const entry = unwinds ? typename E::Calls::Entry() : engine_->calls.enter("the end of an evaluation");
  engine_->passes.end_evaluation();
}

/// Changes the backward passes that begin during its lifetime. A pass that has begun does not change. Scopes nest.
/// @tparam E  detail::EngineCore
template <class E>
class [[nodiscard]] BackwardScope {
 public:
  /// @param on  false: the scope changes nothing
  BackwardScope(E& engine, BackwardChange change, bool on) : engine_(on ? &engine : nullptr), change_(change) {
    if (on) engine.begin_backward_scope(change);
  }
  /// Moves the scope: the change of backward passes lasts until the new scope ends.
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

namespace detail {
/// An open use of a unit. UseScope and HeldUse begin and end it.
/// @tparam E  EngineCore
template <class E>
class OpenUse {
 public:
  OpenUse(OpenUse const&) = delete;
  OpenUse& operator=(OpenUse const&) = delete;

  /// False if no use is open: also if backward passes do not come to the use, because nothing at or below it trains.
  /// Without an open use there are no parameters.
  explicit operator bool() const { return unit_ != nullptr; }
  /// The unit of a tensor: 0 is the unit that the use was declared with, others have tensors of other kinds.
  typename E::Unit& unit(std::size_t of = 0) const {
    return of == 0 ? *unit_ : engine_->declared.unit(unit_->index(), of);
  }
  // The parameters of unit 0.
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

 protected:
  OpenUse() = default;
  ~OpenUse() = default;

  /// @pre no use is open
  /// @throws OrderError if another use comes next; whatever else the operations before the use throw. No use is open
  /// then
  [[gnu::noinline]] void begin_use(E& engine, std::size_t use, Pass pass);
  /// Does nothing if no use is open; none is afterwards.
  /// @throws what an earlier task threw: the pass has ended then; UsageError if another thread is inside a call of the
  /// engine: the use stays open
  [[gnu::noinline]] void end_use();
  /// Ends the pass as an exception out of the use does. Does nothing if no use is open; none is afterwards.
  void abandon_use() noexcept;
  /// @pre the use is open
  Pass pass() const { return pass_; }

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

  E* engine_ = nullptr;
  typename E::Unit* unit_ = nullptr;  ///< nullptr: no use is open
  Pass pass_{};
  typename TraceHook<typename E::Device>::Scope span_;
};

template <class E>
void OpenUse<E>::begin_use(E& engine, std::size_t use, Pass pass) {
  auto const what = fsdp::name(pass);
  auto const entry = engine.calls.enter(what.data());
  unit_ = engine.begin_use(pass, use);
  if (unit_ == nullptr) return;
  engine_ = &engine;
  pass_ = pass;
  try {
    for (std::size_t i = 0; i <= unit_->beside.size(); ++i) begin(unit(i));
    span_ = engine.trace.begin(*engine.compute, StreamKind::compute, unit_->name(), what,
                               fsdp::name(pass == Pass::forward ? Pass::forward : Pass::backward));
  } catch (...) {
    abandon_use();
    throw;
  }
}

template <class E>
void OpenUse<E>::end_use() {
  if (unit_ == nullptr) return;
  auto const entry = engine_->calls.enter(pass_ == Pass::forward    ? "the end of a forward"
                                          : pass_ == Pass::backward ? "the end of a backward"
                                                                    : "the end of a recompute");
  try {
    span_.end();
    for (std::size_t i = 0; i <= unit_->beside.size(); ++i) end(unit(i));
  } catch (...) {
    abandon_use();
    throw;
  }
  unit_ = nullptr;
  engine_->end_use();
}

template <class E>
void OpenUse<E>::abandon_use() noexcept {
  if (unit_ == nullptr) return;
  span_ = {};
  for (std::size_t i = 0; i <= unit_->beside.size(); ++i)
    engine_->guarded.abandon(engine_->device, *engine_->compute, unit(i));
  engine_->passes.interrupt();
  unit_ = nullptr;
}
}  // namespace detail

/// A use of a unit, as a scope. Its full parameters (and in backward its gradients) are valid during the scope's
/// lifetime. An exception that leaves the scope ends the pass. The destructor ends the use and throws if this fails,
/// for example with the exception of an earlier task. It converts to false if backward passes do not come to
/// this use. HeldUse (below) begins in one function and ends in another.
/// @tparam E  detail::EngineCore
template <class E>
class [[nodiscard]] UseScope : public detail::OpenUse<E> {
 public:
  using Core = E;  ///< EngineCore: the parts of an engine

  /// Begins use number `use` of the declared order. @throws OrderError if another one comes next
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

/// Holds one use of a unit at a time, as the scopes of Engine::forward_scope, backward_scope and recompute_scope do,
/// but from begin() to end() or abandon(). The engine must outlive it.
///
/// ```
/// fsdp::HeldUse held{engine};
/// held.begin(fsdp::Pass::backward, block.use());  // in one hook
/// if (held) kernels(held.parameters(), held.gradients());
/// held.end();                                     // in another
/// ```
/// The members unit(), parameters(), gradients(), layout(), buffers() and wants_gradients() are those of a scope: call
/// them while it converts to true.
/// @tparam E  Engine
template <class E>
class HeldUse : public detail::OpenUse<typename E::Scope::Core> {
 public:
  explicit HeldUse(E& engine) : engine_(&engine) {}  ///< holds no use until begin()
  /// Abandons an open use: see abandon().
  ~HeldUse() { abandon(); }

  /// Begins a use. Afterwards it converts to true, unless backward passes do not come to the use (because no unit at or
  /// below it trains): then there are no parameters, and end() does nothing.
  /// @param pass  forward, backward or recompute
  /// @throws UsageError if a use has begun and not ended, or there is no such use; OrderError if another use comes
  /// next; what an earlier task threw. No use has begun then
  /// @note Stream: compute waits for the gather, and in backward for a free gradient slot.
  /// @note Collective: as ShardedModule::forward or backward.
  void begin(Pass pass, UseId use) {
    FSDP_EXPECTS(!begun_, "rank {}: HeldUse::begin: the last use has not ended; call end() or abandon() first",
                 engine_->rank());
    auto const shards = engine_->shards();
    this->begin_use(shards.core(), shards.index_of(use), pass);
    begun_ = true;
  }
  /// Ends the use.
  /// @throws UsageError if none has begun, or another thread is inside a call of the engine: the use stays open then;
  /// and what a function of on_reduced or an earlier task threw: the use and the pass have ended then, as after
  /// abandon()
  /// @note Collective: in backward, the reduction of the unit.
  void end() {
    FSDP_EXPECTS(begun_, "rank {}: HeldUse::end: no use has begun", engine_->rank());
    try {
      this->end_use();
    } catch (...) {
      begun_ = static_cast<bool>(*this);
      throw;
    }
    begun_ = false;
  }
  /// Ends the use and the pass under way, as an exception that leaves a scope does: a forward pass is forgotten; after
  /// half a backward pass, the engine refuses all but discard_gradients(). Does nothing if no use has begun.
  /// @note Collective: no. Peers that go on wait for this rank.
  void abandon() noexcept {
    this->abandon_use();
    begun_ = false;
  }
  /// Whether a use has begun and not ended, also one that backward passes do not come to.
  bool has_begun() const { return begun_; }

 private:
  E* engine_;
  bool begun_ = false;
};
template <class E>
HeldUse(E&) -> HeldUse<E>;

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
