// SPDX-License-Identifier: Apache-2.0
// Devices for tests: wrappers of any device that delay its work, drop its waits, or count what it is asked for.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <thread>

#include "fsdp/concepts.hpp"

namespace fsdp::testing {

/// Occupies a stream for a while: one thread sleeps.
struct DelayKernel {
  template <class Block>
  FSDP_HD void operator()(Block const& block, std::int64_t, std::int64_t microseconds) const {
    if (block.thread() != 0) return;
#if defined(__CUDA_ARCH__)
    for (std::int64_t i = 0; i < microseconds; ++i) __nanosleep(1000);
#else
    if (microseconds > 0) std::this_thread::sleep_for(std::chrono::microseconds{microseconds});
#endif
  }
};

template <class D>
void delay(D const& device, typename D::Stream& stream, std::int64_t microseconds) {
  device.launch(stream, std::int64_t{1}, DelayKernel{}, microseconds);
}

/// A seeded sequence of numbers (splitmix64); safe to draw from several threads, unordered.
class Draws {
 public:
  explicit Draws(std::uint64_t seed) : state_(seed) {}
  /// A number in [0, bound].
  std::int64_t operator()(std::int64_t bound) {
    auto z = state_.fetch_add(0x9e3779b97f4a7c15u, std::memory_order_relaxed) + 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    z ^= z >> 31;
    return static_cast<std::int64_t>(z % static_cast<std::uint64_t>(bound + 1));
  }

 private:
  std::atomic<std::uint64_t> state_;
};

/// Forwards every operation of a device. Wrappers derive from it and redefine what they change.
template <class D>
struct Forward {
  using Stream = typename D::Stream;
  using Event = typename D::Event;
  static constexpr std::string_view name = D::name;

  D base{};

  template <class Device = D>
  auto enable_peer_access(Forward const& peer) const -> decltype(Device(base).enable_peer_access(peer.base)) {
    base.enable_peer_access(peer.base);
  }
  template <class Device = D>
  auto synchronize_all() const noexcept -> decltype(Device(base).synchronize_all()) {
    base.synchronize_all();
  }
  template <class Device = D>
  auto allocate_pinned(std::size_t bytes) const -> decltype(Device(base).allocate_pinned(bytes)) {
    return base.allocate_pinned(bytes);
  }
  template <class Device = D>
  auto deallocate_pinned(void* memory) const noexcept -> decltype(Device(base).deallocate_pinned(memory)) {
    base.deallocate_pinned(memory);
  }
  Stream make_stream(std::string_view label, StreamPriority priority) const {
    return base.make_stream(label, priority);
  }
  Event make_event() const { return base.make_event(); }
  void* allocate(std::size_t bytes) const { return base.allocate(bytes); }
  void deallocate(void* memory, std::size_t bytes) const noexcept { base.deallocate(memory, bytes); }
  void copy_async(Stream& stream, void* to, void const* from, std::size_t bytes) const {
    base.copy_async(stream, to, from, bytes);
  }
  void zero_async(Stream& stream, void* to, std::size_t bytes) const { base.zero_async(stream, to, bytes); }
  template <class Kernel, class... Args>
  void launch(Stream& stream, std::int64_t blocks, Kernel kernel, Args... args) const {
    base.launch(stream, blocks, kernel, args...);
  }
  void record(Event& event, Stream& stream) const { base.record(event, stream); }
  void wait(Stream& stream, Event const& event, WaitSite site) const { base.wait(stream, event, site); }
  void synchronize(Stream& stream) const { base.synchronize(stream); }
  void synchronize(Event const& event) const { base.synchronize(event); }
};

/// Sleeps for 0 to `at_most` microseconds, by seed, before each launch, copy and zeroing. Copies share the sequence.
template <class D>
struct DelayDevice : Forward<D> {
  using typename Forward<D>::Stream;

  DelayDevice() = default;
  DelayDevice(D device, std::uint64_t seed, std::int64_t at_most)
      : Forward<D>{device}, draws(std::make_shared<Draws>(seed)), limit(at_most) {}

  void copy_async(Stream& stream, void* to, void const* from, std::size_t bytes) const {
    pause(stream);
    this->base.copy_async(stream, to, from, bytes);
  }
  void zero_async(Stream& stream, void* to, std::size_t bytes) const {
    pause(stream);
    this->base.zero_async(stream, to, bytes);
  }
  template <class Kernel, class... Args>
  void launch(Stream& stream, std::int64_t blocks, Kernel kernel, Args... args) const {
    pause(stream);
    this->base.launch(stream, blocks, kernel, args...);
  }
  void pause(Stream& stream) const {
    if (draws != nullptr && limit > 0) delay(this->base, stream, (*draws)(limit));
  }

  std::shared_ptr<Draws> draws;
  std::int64_t limit = 0;
};

/// Drops every wait at one site: what a forgotten line in the schedule would do.
template <class D>
struct DropDevice : Forward<D> {
  using typename Forward<D>::Event;
  using typename Forward<D>::Stream;

  DropDevice() = default;
  DropDevice(D device, WaitSite site) : Forward<D>{device}, dropped(site) {}

  void wait(Stream& stream, Event const& event, WaitSite site) const {
    if (site != dropped) {
      this->base.wait(stream, event, site);
    } else if (drops != nullptr) {
      drops->fetch_add(1, std::memory_order_relaxed);
    }
  }

  WaitSite dropped = WaitSite::count_;  ///< count_: none
  std::shared_ptr<std::atomic<std::int64_t>> drops = std::make_shared<std::atomic<std::int64_t>>(0);
};

/// Counts calls. Copies share the counters.
template <class D>
struct CountDevice : Forward<D> {
  using typename Forward<D>::Event;
  using typename Forward<D>::Stream;

  struct Counts {
    std::atomic<std::int64_t> streams{0}, events{0}, allocations{0}, live_bytes{0}, copies{0}, copied_bytes{0},
        zeroings{0}, zeroed_bytes{0}, launches{0}, records{0}, waits{0}, synchronizations{0}, event_synchronizations{0};
    std::array<std::atomic<std::int64_t>, static_cast<std::size_t>(WaitSite::count_)> waits_at{};
  };

  explicit CountDevice(D device = {}) : Forward<D>{device} {}

  Stream make_stream(std::string_view label, StreamPriority priority) const {
    add(counts->streams);
    return this->base.make_stream(label, priority);
  }
  Event make_event() const {
    add(counts->events);
    return this->base.make_event();
  }
  void* allocate(std::size_t bytes) const {
    void* const memory = this->base.allocate(bytes);
    add(counts->allocations);
    add(counts->live_bytes, static_cast<std::int64_t>(bytes));
    return memory;
  }
  void deallocate(void* memory, std::size_t bytes) const noexcept {
    this->base.deallocate(memory, bytes);
    add(counts->live_bytes, -static_cast<std::int64_t>(bytes));
  }
  void copy_async(Stream& stream, void* to, void const* from, std::size_t bytes) const {
    add(counts->copies);
    add(counts->copied_bytes, static_cast<std::int64_t>(bytes));
    this->base.copy_async(stream, to, from, bytes);
  }
  void zero_async(Stream& stream, void* to, std::size_t bytes) const {
    add(counts->zeroings);
    add(counts->zeroed_bytes, static_cast<std::int64_t>(bytes));
    this->base.zero_async(stream, to, bytes);
  }
  template <class Kernel, class... Args>
  void launch(Stream& stream, std::int64_t blocks, Kernel kernel, Args... args) const {
    add(counts->launches);
    this->base.launch(stream, blocks, kernel, args...);
  }
  void record(Event& event, Stream& stream) const {
    add(counts->records);
    this->base.record(event, stream);
  }
  void wait(Stream& stream, Event const& event, WaitSite site) const {
    add(counts->waits);
    add(counts->waits_at[static_cast<std::size_t>(site)]);
    this->base.wait(stream, event, site);
  }
  void synchronize(Stream& stream) const {
    add(counts->synchronizations);
    this->base.synchronize(stream);
  }
  void synchronize(Event const& event) const {
    add(counts->event_synchronizations);
    this->base.synchronize(event);
  }

  std::shared_ptr<Counts> counts = std::make_shared<Counts>();

 private:
  static void add(std::atomic<std::int64_t>& counter, std::int64_t by = 1) {
    counter.fetch_add(by, std::memory_order_relaxed);
  }
};

/// Streams of D that run at once on the calling thread (D::Stream has an `inline_stream`).
template <class D>
struct InlineDevice : Forward<D> {
  using typename Forward<D>::Stream;
  Stream make_stream(std::string_view label, StreamPriority) const { return Stream::inline_stream(label); }
};

}  // namespace fsdp::testing
