// SPDX-License-Identifier: Apache-2.0
// Paths: passes that leave out or repeat uses. Engine::add_path and Engine::follow need this header. No part of
// fsdp.hpp.
#pragma once

#include <cstddef>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/engine/declared_paths.hpp"
#include "fsdp/owned.hpp"
#include "fsdp/step/passes.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

namespace detail {
template <class Declaration>
struct PathAdder {
  /// Adds a path to a declaration: see DeclaredPaths::add.
  static std::size_t add(Declaration& declared, int rank, std::string_view name, std::vector<std::size_t> uses) {
    auto& paths = declared.paths();
    if (paths) return static_cast<DeclaredPaths&>(*paths).add(declared.order(), name, std::move(uses));
    Owned<DeclaredPaths> first(new DeclaredPaths(rank));
    auto const added = first->add(declared.order(), name, std::move(uses));
    paths = Owned<PathList>(first.release());
    return added;
  }
};
}  // namespace detail

/// Passes that begin during its lifetime follow a path. A pass that has begun does not change, and a backward pass
/// follows the path of its forward pass. If several scopes live, the newest holds; they may end in any order.
/// @tparam E  detail::EngineCore
template <class E>
class [[nodiscard]] PathScope {
 public:
  // Not inlined: GCC 12 takes the list for one that outlives the scope (-Wdangling-pointer).
  /// @throws UsageError in the middle of a pass
  [[gnu::cold, gnu::noinline]] PathScope(E& engine, std::size_t path)
      : engine_(&engine), followed_{path, engine.passes.followed()} {
    auto const turn = engine.calls.enter("follow");
    engine.passes.expect_between_passes("a path is followed");
    engine.passes.followed() = &followed_;
  }
  [[gnu::cold, gnu::noinline]] PathScope(PathScope&& other) noexcept
      : engine_(std::exchange(other.engine_, nullptr)), followed_(other.followed_) {
    if (engine_ != nullptr) place_of(&other.followed_) = &followed_;
  }
  PathScope& operator=(PathScope&&) = delete;
  [[gnu::cold, gnu::noinline]] ~PathScope() {
    if (engine_ != nullptr) place_of(&followed_) = followed_.before;
  }

 private:
  /// The pointer of the list that points to the scope.
  step::FollowedPath*& place_of(step::FollowedPath const* scope) const {
    auto* place = &engine_->passes.followed();
    while (*place != scope) place = &(*place)->before;
    return *place;
  }

  E* engine_;
  step::FollowedPath followed_;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
