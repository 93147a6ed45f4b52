// SPDX-License-Identifier: Apache-2.0
// The host as a device: streams are worker threads, memory is the heap, a kernel's blocks are shared by the threads of
// its stream.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <string_view>
#include <type_traits>

#include "fsdp/concepts.hpp"
#include "fsdp/detail/host/guarded_memory.hpp"
#include "fsdp/detail/host/stream.hpp"
#include "fsdp/detail/kernels/block.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::host {

/// Model of fsdp::Device on the host. Copy it freely.
///
/// Streams of normal priority have `threads` threads, which share each kernel's blocks: results are equal to the bit
/// for any number, since a block's sums are its own. Streams of high priority, which move data for collectives, have
/// one.
struct Device {
  int threads = 1;  ///< of a compute stream

  using Stream = host::Stream;                ///< a worker thread and its queue, or an inline stream
  using Event = host::Event;                  ///< a point in the work of a stream, for which others wait
  using GuardedMemory = host::GuardedMemory;  ///< memory that traps accesses while it is closed

  static constexpr std::string_view name = "host";  ///< kind of device
  static constexpr std::size_t alignment = 256;     ///< of every allocation, in bytes

  /// A stream with a worker thread of its own, and with helpers if its priority is normal. Otherwise priorities are
  /// ignored: the operating system schedules the threads.
  Stream make_stream(std::string_view label, StreamPriority priority = StreamPriority::normal) const {
    return Stream{label, priority == StreamPriority::normal ? threads : 1};
  }
  Event make_event() const { return Event{}; }  ///< an event that was never recorded

  /// @returns memory aligned to 256 bytes, not initialised; nullptr for 0 bytes
  /// @throws ResourceError if there is not enough
  void* allocate(std::size_t bytes) const {
    if (bytes == 0) return nullptr;
    void* const memory = ::operator new (bytes, std::align_val_t{alignment}, std::nothrow);
    if (memory == nullptr) fail<ResourceError>("the host cannot allocate {} bytes", bytes);
    return memory;
  }
  /// Frees what allocate() returned, at once; nullptr is allowed.
  void deallocate(void* memory, std::size_t) const noexcept { ::operator delete (memory, std::align_val_t{alignment}); }

  /// Enqueues a copy of `bytes` bytes. `to` and `from` are equal, or the ranges do not overlap.
  void copy_async(Stream& stream, void* to, void const* from, std::size_t bytes) const {
    if (bytes == 0 || to == from) return;
    in_pieces(stream, bytes, [to, from](std::size_t first, std::size_t count) {
      std::memcpy(static_cast<std::byte*>(to) + first, static_cast<std::byte const*>(from) + first, count);
    });
  }
  /// Enqueues the zeroing of `bytes` bytes.
  void zero_async(Stream& stream, void* to, std::size_t bytes) const {
    if (bytes == 0) return;
    in_pieces(stream, bytes, [to](std::size_t first, std::size_t count) {
      std::memset(static_cast<std::byte*>(to) + first, 0, count);
    });
  }

  /// Makes the memory accessible at this point of the stream. It must outlive the stream's work.
  void open_async(Stream& stream, GuardedMemory const& memory) const { set_access(stream, memory, true); }
  /// Makes the memory inaccessible at this point of the stream: its contents are lost.
  void close_async(Stream& stream, GuardedMemory const& memory) const { set_access(stream, memory, false); }

  /// Enqueues `Kernel{}(block, index, args...)` for index in [0, blocks), as one task of so many parts.
  template <class Kernel, class... Args>
  void launch(Stream& stream, std::int64_t blocks, Kernel, Args... args) const {
    static_assert(std::is_empty_v<Kernel> && std::is_default_constructible_v<Kernel>, "kernels are stateless functors");
    static_assert((std::is_trivially_copyable_v<Args> && ...), "a kernel's arguments are passed by value");
    if (blocks < 0) refuse(stream, blocks);
    stream.enqueue_parts(blocks, [args...](std::int64_t index) { Kernel{}(HostBlock{}, index, args...); });
  }

  void record(Event& event, Stream& stream) const { stream.record(event); }  ///< lets the event mark the work so far
  /// @throws UsageError if `event` was never recorded
  void wait(Stream& stream, Event const& event, WaitSite site) const { stream.wait(event, site); }
  /// Blocks the calling thread until the stream's work is done; rethrows what a task threw.
  void synchronize(Stream& stream) const { stream.synchronize(); }
  /// Blocks the calling thread until the event's latest record is reached, and sees what was done before it.
  /// @throws UsageError if `event` was never recorded
  void synchronize(Event const& event) const { Stream::await(event); }

 private:
  static constexpr std::size_t piece = std::size_t{1} << 20;  ///< bytes; takes about 100 us to move

  [[gnu::noinline]] static void set_access(Stream& stream, GuardedMemory const& memory, bool open) {
    stream.enqueue([&memory, open] { open ? memory.open() : memory.close(); });
  }
  /// Enqueues move(first, count) for the whole range at once, or for pieces of it on a stream with several threads.
  template <class Move>
  [[gnu::noinline]] static void in_pieces(Stream& stream, std::size_t bytes, Move move) {
    auto const most = stream.threads() == 1 ? bytes : piece;
    stream.enqueue_parts(static_cast<std::int64_t>((bytes + most - 1) / most), [=](std::int64_t index) {
      auto const first = static_cast<std::size_t>(index) * most;
      move(first, bytes - first < most ? bytes - first : most);
    });
  }
  [[noreturn, gnu::cold, gnu::noinline]] static void refuse(Stream const& stream, std::int64_t blocks) {
    fail<UsageError>("stream '{}': expected 0 or more blocks for a kernel, got {}", stream.name(), blocks);
  }
};

static_assert(fsdp::Device<Device>);
static_assert(ReportsFailure<Stream>);

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::host
