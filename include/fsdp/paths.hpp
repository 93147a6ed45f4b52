// SPDX-License-Identifier: Apache-2.0
// Paths: passes that leave out or repeat uses. Engine::add_path and Engine::follow need this header; fsdp.hpp
// does not include it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/detail/base/fixed_array.hpp"
#include "fsdp/detail/engine/callbacks.hpp"
#include "fsdp/detail/step/input.hpp"
#include "fsdp/detail/step/passes.hpp"
#include "fsdp/detail/step/uses.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail {

/// The paths of an engine until it is sealed. Host logic only.
class DeclaredPaths final : public PathList {
 public:
  explicit DeclaredPaths(int rank) : rank_(rank) {}

  std::size_t size() const override { return 1 + paths_.size(); }
  /// @param uses  of `declared`, which are there
  /// @return its number
  /// @throws UsageError if it has no use, its name is empty or taken, or it has a part of a segment
  [[gnu::cold]] std::size_t add(UseOrder const& declared, std::string_view name, std::vector<std::size_t> uses) {
    FSDP_EXPECTS(!name.empty(), "rank {}: add_path: a path needs a name", rank_);
    FSDP_EXPECTS(!uses.empty(), "rank {}: add_path: the path '{}' has no uses", rank_, name);
    for (auto const& path : paths_)
      FSDP_EXPECTS(path.name != name, "rank {}: add_path: the engine already has a path '{}'", rank_, name);
    auto const fault = segment_fault(declared, uses);
    FSDP_EXPECTS(fault.empty(), "rank {}: add_path: the path '{}' {}", rank_, name, fault);
    FixedArray<StepPath> more(paths_.size() + 1);
    more.back() = {std::string(name), std::move(uses), {}};
    for (std::size_t path = 0; path < paths_.size(); ++path) more[path] = std::move(paths_[path]);
    paths_ = std::move(more);
    return paths_.size();
  }
  [[gnu::cold]] void expect_segments(UseOrder const& declared) const override {
    for (auto const& path : paths_) {
      auto const fault = segment_fault(declared, path.uses);
      FSDP_EXPECTS(fault.empty(), "rank {}: the path '{}' {}", rank_, path.name, fault);
    }
  }
  [[gnu::cold]] std::string text(UseOrder const& declared) const override {
    std::string lines;
    for (auto const& path : paths_) {
      lines += formatted("path '{}' of uses", path.name);
      for (auto const use : path.uses) lines += formatted(" {} '{}'", use, declared.module_name(use));
      lines += '\n';
    }
    return lines;
  }
  [[gnu::cold]] FixedArray<StepPath> plan(UseOrder const& declared, int forward, int backward,
                                          FixedArray<bool> const& empty) const override {
    auto planned = paths_;
    for (auto& path : planned)
      path.prefetch = prefetch_by_depth(UseOrder(declared, path.name, path.uses), forward, backward, empty);
    return planned;
  }
  [[gnu::cold]] void set_prefetch(FixedArray<StepPath>& paths, bool in_forward, std::size_t at,
                                  std::vector<std::size_t> const& ahead) const override {
    for (auto& path : paths) {
      auto const& uses = path.uses;
      for (std::size_t place = 0; place < uses.size(); ++place) {
        if (uses[place] != at) continue;
        auto& list = (in_forward ? path.prefetch.forward : path.prefetch.backward)[place];
        list.clear();
        for (auto const use : ahead) {
          auto next = place;
          auto const step = in_forward ? std::size_t{1} : ~std::size_t{0};
          do next += step;
          while (next < uses.size() && uses[next] != use);
          if (next < uses.size()) list.push_back(next);
        }
      }
    }
  }

  [[gnu::cold]] void seal() override {
    labels_ = FixedArray<std::string>(size());
    labels_[0] = "the declared order";
    for (std::size_t path = 0; path < paths_.size(); ++path) {
      auto const& name = paths_[path].name;
      // A label has little room. Names that begin alike are told apart by their numbers.
      constexpr std::size_t most = 24;
      labels_[path + 1] = name.size() <= most ? formatted("path '{}'", name)
                                              : formatted("path {} '{}...'", path + 1, name.substr(0, most));
    }
  }
  std::string_view label(std::size_t path) const override { return labels_[path]; }

 private:
  /// "" if `uses` have only whole segments, each once.
  [[gnu::cold]] static std::string segment_fault(UseOrder const& declared, std::vector<std::size_t> const& uses) {
    std::vector<std::size_t> seen;
    for (std::size_t at = 0; at < uses.size(); ++at) {
      auto const first = declared.segment(uses[at]);
      if (first == UseOrder::none) continue;
      auto last = first;
      while (!declared.ends_segment(last)) ++last;
      auto const segment =
          formatted("the segment '{}' to '{}'", declared.module_name(first), declared.module_name(last));
      for (auto const earlier : seen)
        if (earlier == first) return formatted("repeats {}; a path has a segment once at most", segment);
      seen.push_back(first);
      for (auto use = first; use <= last; ++use)
        if (at + (use - first) >= uses.size() || uses[at + (use - first)] != use)
          return formatted("has a part of {} alone, or in another order; a path has all of a segment or nothing",
                           segment);
      at += last - first;
    }
    return {};
  }

  int rank_;
  FixedArray<StepPath> paths_;
  FixedArray<std::string> labels_;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

namespace detail {
template <class Declaration>
struct PathAdder {
  /// Adds a path to a declaration: see DeclaredPaths::add.
  static std::size_t add(Declaration& declared, int rank, std::string_view name, std::vector<std::size_t> uses) {
    auto& paths = declared.paths();
    if (paths) return static_cast<DeclaredPaths&>(*paths).add(declared.order(), name, std::move(uses));
    auto first = std::make_unique<DeclaredPaths>(rank);
    auto const added = first->add(declared.order(), name, std::move(uses));
    paths = std::move(first);
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
    auto const entry = engine.calls.enter("follow");
    engine.passes.expect_between_passes("a path is followed");
    engine.passes.followed() = &followed_;
  }
  /// Moves the scope: passes follow the path until the new scope ends.
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
