// SPDX-License-Identifier: Apache-2.0
// Scopes of an engine that a test opens and closes by name.
#pragma once

#include <optional>

#include "fsdp/fsdp.hpp"

namespace fsdp::testing {

template <class E>
class BackwardScopes {
 public:
  explicit BackwardScopes(E& engine) : engine_(&engine) {}

  /// Opens the scope, or closes it.
  void no_sync(bool on) {
    no_sync_.reset();
    if (on) no_sync_.emplace(engine_->no_sync());
    flags_.gradient_sync = !on;
  }
  void no_replica_sync(bool on) {
    no_replica_sync_.reset();
    if (on) no_replica_sync_.emplace(engine_->no_replica_sync());
    flags_.replica_sync = !on;
  }
  void keep_unsharded(bool on) {
    keep_unsharded_.reset();
    if (on) keep_unsharded_.emplace(engine_->keep_unsharded());
    flags_.reshard = !on;
  }
  BackwardFlags flags() const { return flags_; }

 private:
  E* engine_;
  BackwardFlags flags_;
  std::optional<typename E::Backward> no_sync_, no_replica_sync_, keep_unsharded_;
};

}  // namespace fsdp::testing
