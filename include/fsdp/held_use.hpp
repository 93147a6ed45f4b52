// SPDX-License-Identifier: Apache-2.0
// A use that begins in one function and ends in another, such as two hooks of an autograd engine.
#pragma once

#include <cstddef>

#include "fsdp/engine/scopes.hpp"
#include "fsdp/engine_options.hpp"
#include "fsdp/error.hpp"
#include "fsdp/step/program.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// Holds one use of a unit at a time, as the scopes of Engine::forward_scope, backward_scope and recompute_scope do,
/// but from begin() to end() or abandon(). The engine must outlive it.
///
/// ```
/// fsdp::HeldUse held{engine};
/// held.begin(fsdp::Pass::backward, block.use());  // in one hook
/// if (held) kernels(held.parameters(), held.gradients());
/// held.end();                                     // in another
/// ```
/// Its members unit(), parameters(), gradients(), layout(), buffers() and wants_gradients() are those of a scope: call
/// them while it converts to true.
/// @tparam E  Engine
template <class E>
class HeldUse : public detail::OpenUse<typename E::Scope::Core> {
 public:
  explicit HeldUse(E& engine) : engine_(&engine) {}
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
