// SPDX-License-Identifier: Apache-2.0
// The host as a device: streams are worker threads, memory is the heap, a kernel's blocks run one after another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <string_view>
#include <type_traits>

#include "fsdp/concepts.hpp"
#include "fsdp/error.hpp"
#include "fsdp/host/stream.hpp"
#include "fsdp/kernels/block.hpp"

namespace fsdp::host {

/// Model of fsdp::Device that needs no accelerator. Stateless; copy it freely.
struct Device {
  using Stream = host::Stream;
  using Event = host::Event;

  static constexpr std::string_view name = "host";
  static constexpr std::size_t alignment = 256;  ///< of every allocation, in bytes

  /// A stream with a worker thread of its own. Priorities are ignored: the operating system schedules the workers.
  Stream make_stream(std::string_view label, StreamPriority = StreamPriority::normal) const { return Stream{label}; }
  Event make_event() const { return Event{}; }

  /// @returns memory aligned to 256 bytes, not initialised; nullptr for 0 bytes
  /// @throws ResourceError if there is not enough
  void* allocate(std::size_t bytes) const {
    if (bytes == 0) return nullptr;
    void* const memory = ::operator new (bytes, std::align_val_t{alignment}, std::nothrow);
    if (memory == nullptr) fail<ResourceError>("the host cannot allocate {} bytes", bytes);
    return memory;
  }
  void deallocate(void* memory, std::size_t) const noexcept { ::operator delete (memory, std::align_val_t{alignment}); }

  void copy_async(Stream& stream, void* to, void const* from, std::size_t bytes) const {
    if (bytes == 0 || to == from) return;
    stream.enqueue([to, from, bytes] { std::memcpy(to, from, bytes); });
  }
  void zero_async(Stream& stream, void* to, std::size_t bytes) const {
    if (bytes == 0) return;
    stream.enqueue([to, bytes] { std::memset(to, 0, bytes); });
  }

  /// Enqueues `Kernel{}(block, index, args...)` for index in [0, blocks), as one task.
  template <class Kernel, class... Args>
  void launch(Stream& stream, std::int64_t blocks, Kernel, Args... args) const {
    static_assert(std::is_empty_v<Kernel> && std::is_default_constructible_v<Kernel>, "kernels are stateless functors");
    static_assert((std::is_trivially_copyable_v<Args> && ...), "a kernel's arguments are passed by value");
    FSDP_EXPECTS(blocks >= 0, "stream '{}': a kernel cannot run in {} blocks", stream.name(), blocks);
    if (blocks == 0) return;
    stream.enqueue([blocks, args...] {
      for (std::int64_t index = 0; index < blocks; ++index) Kernel{}(HostBlock{}, index, args...);
    });
  }

  void record(Event& event, Stream& stream) const { stream.record(event); }
  /// @throws UsageError if `event` was never recorded
  void wait(Stream& stream, Event const& event, WaitSite site) const { stream.wait(event, site); }
  /// Blocks the calling thread until the stream's work is done; rethrows what a task threw.
  void synchronize(Stream& stream) const { stream.synchronize(); }
  /// Blocks the calling thread until the event's latest record is reached, and sees what was done before it.
  /// @throws UsageError if `event` was never recorded
  void synchronize(Event const& event) const { Stream::await(event); }
};

static_assert(fsdp::Device<Device>);

}  // namespace fsdp::host
