// SPDX-License-Identifier: Apache-2.0
// A pointer that is null after its owner was moved from, and a guard that refuses a call of an engine while another
// host thread is inside one.
#pragma once

#include <atomic>
#include <cstdint>
#include <string_view>
#include <utility>

#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail {

/// Points to an object of its owner; null after the owner was moved from, so that its use throws.
template <class T>
class CheckedPointer {
 public:
  explicit CheckedPointer(T* pointer) : pointer_(pointer) {}
  CheckedPointer(CheckedPointer&& other) noexcept : pointer_(std::exchange(other.pointer_, nullptr)) {}
  CheckedPointer& operator=(CheckedPointer&& other) noexcept {
    pointer_ = std::exchange(other.pointer_, nullptr);
    return *this;
  }
  /// @throws UsageError if `what`, its owner, was moved from
  T* get(std::string_view what) const {
    FSDP_EXPECTS(pointer_ != nullptr, "{} was used after it was moved from", what);
    return pointer_;
  }
  bool is_set() const { return pointer_ != nullptr; }

 private:
  T* pointer_;
};

/// The address of this variable identifies the calling thread.
inline thread_local constinit char thread_mark = 0;

/// Lets one host thread at a time into the calls of an engine. Calls nest on one thread.
///
/// [Note: One thread at a time] All accesses are relaxed. The guard finds two threads that are inside at once; it
/// orders nothing. A program that hands an engine over synchronises its threads itself (a join, a mutex), and
/// ThreadSanitizer still reports one that does not.
class CallGuard {
 public:
  explicit CallGuard(int rank) : rank_(rank) {}
  CallGuard(CallGuard const&) = delete;
  CallGuard& operator=(CallGuard const&) = delete;

  /// The calling thread is inside while this lives.
  class [[nodiscard]] Entry {
   public:
    Entry() = default;
    Entry(Entry&& other) noexcept : guard_(std::exchange(other.guard_, nullptr)) {}
    Entry& operator=(Entry&&) = delete;
    ~Entry() {
      if (guard_ != nullptr) guard_->inside_.store(0, std::memory_order_relaxed);
    }

   private:
    friend CallGuard;
    explicit Entry(CallGuard& guard) : guard_(&guard) {}
    CallGuard* guard_ = nullptr;  ///< nullptr: an outer call on this thread is inside
  };

  /// @param call  its name, a literal
  /// @throws UsageError if another thread is inside a call
  Entry enter(char const* call) {
    auto const self = reinterpret_cast<std::uintptr_t>(&thread_mark);
    auto other = inside_.load(std::memory_order_relaxed);
    if (other == self) return {};
    other = 0;
    if (!inside_.compare_exchange_strong(other, self, std::memory_order_relaxed)) refuse(call);
    call_.store(call, std::memory_order_relaxed);
    return Entry(*this);
  }

 private:
  [[noreturn, gnu::cold]] void refuse(char const* call) const {
    fail<UsageError>(
        "rank {}: {} is called while another thread is inside a call of this engine (last entered: {}). Only one host "
        "thread at a time may call an engine; other threads may call it when that call has returned",
        rank_, std::string_view(call), std::string_view(call_.load(std::memory_order_relaxed)));
  }

  int rank_;
  std::atomic<std::uintptr_t> inside_{0};         ///< the thread that is inside; 0: none
  std::atomic<char const*> call_{"no call yet"};  ///< entered last, for the message
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail
