// SPDX-License-Identifier: Apache-2.0
// A byte-exact account of what is reserved from allocators and what of it is in use; page-locked host memory for
// asynchronous copies.
#pragma once

#include <array>
#include <atomic>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "fsdp/concepts.hpp"
#include "fsdp/version.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// Use of memory.
enum class MemoryTag : unsigned char {
  parameters,   ///< master shards (S)
  gradients,    ///< gradient shards (S)
  optimizer,    ///< moments
  gather,       ///< buffers of unsharded parameters
  reduce,       ///< slots of unsharded gradients, and rounded ones on their way
  activations,  ///< the application's activation arena
  workspace,    ///< the application's scratch
  scalars,      ///< norms, clip factors, losses
  snapshot,     ///< host memory that a checkpoint is written from while training goes on
  offloaded,    ///< host memory of optimizer state
  count_
};

/// Names of memory tags, by MemoryTag, for messages.
inline constexpr std::array<std::string_view, static_cast<std::size_t>(MemoryTag::count_)> memory_tag_names{
    "parameters",  "gradients", "optimizer", "gather",   "reduce",
    "activations", "workspace", "scalars",   "snapshot", "offloaded"};

/// Name of a memory tag, for messages.
constexpr std::string_view name(MemoryTag tag) { return memory_tag_names[static_cast<std::size_t>(tag)]; }

/// Bytes by tag, now and at the peak. Counters are relaxed atomics: they order nothing.
class MemoryAccount {
 public:
  /// Adds bytes that came from an allocator, or, if negative, were returned.
  void reserve(MemoryTag tag, std::int64_t bytes) { reserved_.add(tag, bytes); }
  /// Adds bytes that are in use, or, if negative, no more in use, in the host's enqueue order.
  void add_live(MemoryTag tag, std::int64_t bytes) { live_.add(tag, bytes); }
  /// Former name of add_live.
  [[deprecated("write add_live")]] void lease(MemoryTag tag, std::int64_t bytes) { add_live(tag, bytes); }

  std::int64_t reserved(MemoryTag tag) const { return reserved_.now(tag); }  ///< bytes from allocators, now
  std::int64_t live(MemoryTag tag) const { return live_.now(tag); }          ///< bytes in use, now

  /// Bytes of parameters, gradients, optimizer state, gather and reduce buffers: the memory that docs/strategies.md
  /// tabulates.
  std::int64_t reserved_state() const { return reserved_.state(); }
  std::int64_t live_state() const { return live_.state(); }          ///< bytes in use, of the tags of reserved_state()
  std::int64_t reserved_total() const { return reserved_.total(); }  ///< bytes from allocators, of all tags
  /// Highest live_state() since the last reset_peak().
  std::int64_t peak_live_state() const { return live_.peak_state(); }
  void reset_peak() { live_.reset_peak(); }  ///< sets peak_live_state() to live_state()

 private:
  class Counters {
   public:
    [[gnu::noinline]] void add(MemoryTag tag, std::int64_t bytes) {
      by_tag_[static_cast<std::size_t>(tag)].fetch_add(bytes, std::memory_order_relaxed);
      auto const now = state();
      auto peak = peak_.load(std::memory_order_relaxed);
      while (now > peak && !peak_.compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
      }
    }
    std::int64_t now(MemoryTag tag) const {
      return by_tag_[static_cast<std::size_t>(tag)].load(std::memory_order_relaxed);
    }
    std::int64_t state() const { return sum(static_cast<std::size_t>(MemoryTag::activations)); }
    std::int64_t total() const { return sum(static_cast<std::size_t>(MemoryTag::count_)); }
    std::int64_t peak_state() const { return peak_.load(std::memory_order_relaxed); }
    void reset_peak() { peak_.store(state(), std::memory_order_relaxed); }

   private:
    std::int64_t sum(std::size_t tags) const {
      std::int64_t bytes = 0;
      for (std::size_t tag = 0; tag < tags; ++tag) bytes += by_tag_[tag].load(std::memory_order_relaxed);
      return bytes;
    }
    std::array<std::atomic<std::int64_t>, static_cast<std::size_t>(MemoryTag::count_)> by_tag_{};
    std::atomic<std::int64_t> peak_{0};
  };
  Counters reserved_, live_;
};

/// Memory from an allocator (a Device or a Communicator), entered in an account while this object lives. The allocator
/// and the account must outlive it.
template <class Allocator>
class AccountedMemory {
 public:
  AccountedMemory() = default;
  /// Calls allocate(bytes), which may throw or be collective, and adds the bytes to the account under `tag`.
  [[gnu::cold]] AccountedMemory(Allocator& allocator, MemoryAccount& account, MemoryTag tag, std::size_t bytes)
      : allocator_(&allocator), account_(&account), tag_(tag), bytes_(bytes), data_(allocator.allocate(bytes)) {
    account_->reserve(tag_, static_cast<std::int64_t>(bytes_));
  }
  AccountedMemory(AccountedMemory&& other) noexcept { swap(other); }  ///< `other` is empty then
  /// Returns its memory to the allocator, and takes that of `other`, which is empty then.
  AccountedMemory& operator=(AccountedMemory&& other) noexcept {
    AccountedMemory(std::move(other)).swap(*this);
    return *this;
  }
  [[gnu::cold, gnu::noinline]] ~AccountedMemory() {
    if (allocator_ == nullptr) return;
    allocator_->deallocate(data_, bytes_);
    account_->reserve(tag_, -static_cast<std::int64_t>(bytes_));
  }

  std::byte* data() const { return static_cast<std::byte*>(data_); }  ///< nullptr: no memory
  /// The memory as elements of type T; nullptr: no memory.
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  std::size_t bytes() const { return bytes_; }                 ///< 0: no memory
  explicit operator bool() const { return data_ != nullptr; }  ///< whether there is memory

  /// Exchanges the memory of two objects, with allocator and account.
  void swap(AccountedMemory& other) noexcept {
    std::swap(allocator_, other.allocator_);
    std::swap(account_, other.account_);
    std::swap(tag_, other.tag_);
    std::swap(bytes_, other.bytes_);
    std::swap(data_, other.data_);
  }

 private:
  Allocator* allocator_ = nullptr;
  MemoryAccount* account_ = nullptr;
  MemoryTag tag_ = MemoryTag::parameters;
  std::size_t bytes_ = 0;
  void* data_ = nullptr;
};

/// Registers `memory` with `mover`, if both exist and the communicator models RegistersMemory.
/// @note Collective: yes, over mover, if it registers.
template <Communicator C>
[[gnu::cold]] void register_with(std::optional<C>& mover, AccountedMemory<C> const& memory) {
  if constexpr (RegistersMemory<C>)
    if (mover && memory) mover->register_memory(memory.data(), memory.bytes());
}

/// A device with page-locked host memory of its own: copies to and from other memory may block the caller there.
template <class D>
concept PinsMemory = requires(D const device, std::size_t bytes, void* memory) {
  { device.allocate_pinned(bytes) } -> std::same_as<void*>;
  device.deallocate_pinned(memory);
};

/// `count` elements of host memory that device D copies from and to while the caller goes on.
template <class D, class T>
class PinnedArray {
 public:
  /// Takes memory, which is not zeroed. @throws ResourceError; std::bad_alloc if D has no pinned memory of its own
  PinnedArray(D const& device, std::size_t count) : memory_(allocate(device, count), Free{device}) {}

  T* data() const { return memory_.get(); }  ///< first of `count` elements

 private:
  struct Free {
    D device;
    void operator()(T* memory) const noexcept {
      if constexpr (PinsMemory<D>) {
        device.deallocate_pinned(memory);
      } else {
        delete[] memory;
      }
    }
  };
  static T* allocate(D const& device, std::size_t count) {
    if constexpr (PinsMemory<D>) {
      return static_cast<T*>(device.allocate_pinned(count * sizeof(T)));
    } else {
      static_cast<void>(device);
      return new T[count];  // not zeroed
    }
  }

  std::unique_ptr<T[], Free> memory_;
};
template <class D, class T>
using Staging [[deprecated("write PinnedArray")]] = PinnedArray<D, T>;  ///< former name of PinnedArray

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
