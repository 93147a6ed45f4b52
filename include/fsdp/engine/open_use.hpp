// SPDX-License-Identifier: Apache-2.0
// An open use of a unit: the common base of UseScope and HeldUse.
#pragma once

#include <cstddef>

#include "fsdp/engine/flat_param.hpp"
#include "fsdp/layout.hpp"
#include "fsdp/step/schedule.hpp"
#include "fsdp/trace/trace.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail {

/// An open use. The derived class begins and ends it.
/// @tparam E  EngineCore
template <class E>
class OpenUse {
 public:
  OpenUse(OpenUse const&) = delete;
  OpenUse& operator=(OpenUse const&) = delete;

  /// False if no use is open: also if backward passes do not come to the use, because nothing at or below it trains.
  /// There are no parameters then.
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
  [[gnu::noinline]] void begin_use(E& engine, std::size_t use, Pass pass) {
    auto const what = fsdp::name(pass);
    auto const turn = engine.calls.enter(what.data());
    bool const forward = pass == Pass::forward;
    if (!forward && engine.skips_backward(pass, use)) return;
    engine_ = &engine;
    use_ = use;
    pass_ = pass;
    unit_ = &(forward ? engine.begin_forward(use) : engine.begin_backward(pass, use));
    try {
      for (std::size_t i = 0; i <= unit_->beside.size(); ++i) begin(unit(i));
      span_ = engine.trace.begin(*engine.compute, StreamKind::compute, unit_->name(), what,
                                 fsdp::name(forward ? Pass::forward : Pass::backward));
    } catch (...) {
      abandon_use();
      throw;
    }
  }
  /// Does nothing if no use is open; none is afterwards.
  /// @throws what an earlier task threw: the pass has ended then; UsageError if another thread is inside a call of the
  /// engine: the use stays open
  [[gnu::noinline]] void end_use() {
    if (unit_ == nullptr) return;
    auto const turn = engine_->calls.enter(pass_ == Pass::forward    ? "the end of a forward"
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
    auto& passes = engine_->passes;
    if (pass_ == Pass::forward) {
      passes.end_forward(use_);
    } else {
      passes.end_backward(use_);
    }
  }
  /// Ends the pass as an exception out of the use does. Does nothing if no use is open; none is afterwards.
  void abandon_use() noexcept {
    if (unit_ == nullptr) return;
    span_ = {};
    for (std::size_t i = 0; i <= unit_->beside.size(); ++i)
      engine_->guarded.abandon(engine_->device, *engine_->compute, unit(i));
    engine_->passes.interrupt();
    unit_ = nullptr;
  }
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
  std::size_t use_ = 0;
  Pass pass_ = Pass::idle;
  typename TraceHook<typename E::Device>::Scope span_;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail
