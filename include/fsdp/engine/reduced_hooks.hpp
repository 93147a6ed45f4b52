// SPDX-License-Identifier: Apache-2.0
// Functions of the caller that run after the reduction of a unit's gradients: see Shards::on_reduced.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "fsdp/version.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail {

/// A function of Shards::on_reduced. (std::function and std::unique_ptr would take longer to compile, and so would a
/// std::span here.)
class ReducedHook {
 public:
  virtual ~ReducedHook() = default;
  /// @param stream  points to a stream of the engine's device
  virtual void call(void* stream, float* gradients, std::int64_t elements) = 0;

  ReducedHook* next = nullptr;
};

/// @tparam Stream  of the engine's device
template <class Stream, class F>
class ReducedHookOf final : public ReducedHook {
 public:
  explicit ReducedHookOf(F f) : f_(std::move(f)) {}
  void call(void* stream, float* gradients, std::int64_t elements) override {
    f_(*static_cast<Stream*>(stream), std::span<float>(gradients, static_cast<std::size_t>(elements)));
  }

 private:
  F f_;
};

/// Functions of one unit, in the order of registration.
struct ReducedHooks {
  ReducedHook* first = nullptr;
  int size = 0;

  ReducedHooks() = default;
  ReducedHooks(ReducedHooks const&) = delete;
  ~ReducedHooks() {
    while (auto* const hook = first) {
      first = hook->next;
      delete hook;
    }
  }
  /// Takes ownership.
  [[gnu::cold]] void add(ReducedHook* hook) {
    auto** last = &first;
    while (*last != nullptr) last = &(*last)->next;
    *last = hook;
    ++size;
  }
  /// @param stream  points to a stream of the engine's device
  void call(void* stream, float* gradients, std::int64_t elements) const {
    for (auto* hook = first; hook != nullptr; hook = hook->next) hook->call(stream, gradients, elements);
  }
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail
