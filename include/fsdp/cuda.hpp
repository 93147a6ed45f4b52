// SPDX-License-Identifier: Apache-2.0
// A CUDA device: memory, streams, events, kernel launches.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "fsdp/concepts.hpp"
#include "fsdp/detail/cuda/handles.hpp"
#include "fsdp/detail/cuda/nvtx.hpp"
#include "fsdp/error.hpp"

#if defined(__CUDACC__) || defined(FSDP_CUDA_STANDIN)
#include "fsdp/detail/cuda/launch.hpp"
#endif

namespace fsdp::inline FSDP_VERSION_NAMESPACE::cuda {

/// A CUDA stream: owned, made by Device::make_stream; or a view of the caller's, made by `adopt`.
class Stream {
 public:
  /// Takes ownership.
  explicit Stream(UniqueStream owned) noexcept : owned_(std::move(owned)), handle_(owned_.get()), usable_(true) {}
  Stream(Stream&& other) noexcept { swap(other); }  ///< takes the stream; get() of `other` throws then
  /// Takes the stream; one that it owned before is destroyed. get() of `other` throws then.
  Stream& operator=(Stream&& other) noexcept {
    Stream(std::move(other)).swap(*this);
    return *this;
  }
  ~Stream() = default;

  /// A view of the caller's stream, which must outlive it.
  static Stream adopt(cudaStream_t stream) noexcept {
    Stream view;
    view.handle_ = stream;
    view.usable_ = true;
    return view;
  }
  static Stream adopt(int) = delete;
  static Stream adopt(std::nullptr_t) = delete;

  /// @throws UsageError after the stream was moved from: its empty handle would name CUDA's default stream
  cudaStream_t get() const {
    FSDP_EXPECTS(usable_, "this CUDA stream was moved from; use the object to which it was moved");
    return handle_;
  }
  bool owns() const noexcept { return static_cast<bool>(owned_); }  ///< false: a view, or moved from
  /// Exchanges streams and their ownership.
  void swap(Stream& other) noexcept {
    owned_.swap(other.owned_);
    std::swap(handle_, other.handle_);
    std::swap(usable_, other.usable_);
  }

 private:
  Stream() = default;
  UniqueStream owned_;
  cudaStream_t handle_ = nullptr;
  bool usable_ = false;
};

/// A CUDA event, and whether it was ever recorded (CUDA does not tell: it lets a wait on an unrecorded event pass).
class Event {
 public:
  /// Takes ownership.
  explicit Event(UniqueEvent owned) noexcept : owned_(std::move(owned)) {}
  /// Takes the event, recorded or not; get() of `other` throws then.
  Event(Event&& other) noexcept
      : owned_(std::move(other.owned_)), recorded_(other.recorded_.exchange(false, std::memory_order_relaxed)) {}
  /// Takes the event, recorded or not; its own one is destroyed. get() of `other` throws then.
  Event& operator=(Event&& other) noexcept {
    if (this == &other) return *this;
    owned_ = std::move(other.owned_);
    recorded_.store(other.recorded_.exchange(false, std::memory_order_relaxed), std::memory_order_relaxed);
    return *this;
  }
  ~Event() = default;

  /// @throws UsageError after the event was moved from
  cudaEvent_t get() const {
    FSDP_EXPECTS(static_cast<bool>(owned_), "this CUDA event was moved from; use the object to which it was moved");
    return owned_.get();
  }
  bool recorded() const noexcept { return recorded_.load(std::memory_order_relaxed); }  ///< recorded at least once

 private:
  friend class Device;
  UniqueEvent owned_;
  // Atomic because a peer's thread may wait on the event while its owner records it again. It orders nothing.
  std::atomic<bool> recorded_{false};
};

/// Options of a Device.
struct DeviceOptions {
  bool timed_events = false;  ///< events keep time stamps, for tracing; each record then costs a little more
};

/// Bytes of a device's memory.
struct DeviceMemory {
  std::size_t free = 0;   ///< not allocated by any process
  std::size_t total = 0;  ///< all memory of the device
};

/// A CUDA device: a cheap handle. Models fsdp::Device. Calls make the device current for the calling thread, and leave
/// it so.
///
/// @note Copies to or from pageable host memory may block the calling thread and do not overlap: take host buffers from
/// `allocate_pinned`.
class Device {
 public:
  using Stream = cuda::Stream;                      ///< result of make_stream
  using Range = NvtxRange;                          ///< range of a span, on the calling thread's timeline
  using Event = cuda::Event;                        ///< result of make_event and make_timed_event
  static constexpr std::string_view name = "cuda";  ///< kind of device
  static constexpr bool thread_blocks = true;       ///< runs kernels as thread blocks

  /// @throws ResourceError "no CUDA device: ..."; ConfigError if `ordinal` does not exist
  explicit Device(int ordinal = 0, DeviceOptions options = {}) : ordinal_(ordinal), options_(options) {
    require_device(ordinal);
    warn_of_one_connection();
  }

  int ordinal() const noexcept { return ordinal_; }  ///< CUDA's number of the device, from 0 on
  /// Makes this the calling thread's current device, for calls of CUDA's own.
  void make_current() const { cuda::make_current(ordinal_); }
  /// Whether both are the same GPU; options do not matter.
  friend bool operator==(Device const& left, Device const& right) noexcept { return left.ordinal_ == right.ordinal_; }

  /// Lets kernels of this device read and write the memory of `peer`, from now on in the whole process.
  /// @throws ConfigError naming both devices where the machine has no way between them that kernels can take
  void enable_peer_access(Device const& peer) const { cuda::enable_peer_access(ordinal_, peer.ordinal_); }

  /// A stream that does not wait for CUDA's default stream. `label` names it in profilers.
  Stream make_stream(std::string_view label, StreamPriority priority = StreamPriority::normal) const {
    make_current();
    int least = 0;
    int greatest = 0;
    FSDP_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    cudaStream_t stream = nullptr;
    FSDP_CUDA_CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking,
                                                 priority == StreamPriority::high ? greatest : least));
    UniqueStream owned(stream);
    name_stream(stream, label);
    return Stream(std::move(owned));
  }

  Event make_event() const { return make_event(options_.timed_events); }  ///< timed if DeviceOptions::timed_events
  /// An event that `elapsed_milliseconds` can read.
  Event make_timed_event() const { return make_event(true); }

  /// @return `bytes` of device memory, aligned to 256 bytes; nullptr for 0
  /// @throws ResourceError that names the bytes wanted, free and there
  void* allocate(std::size_t bytes) const {
    if (bytes == 0) return nullptr;
    make_current();
    void* memory = nullptr;
    if (auto const status = cudaMalloc(&memory, bytes); status != cudaSuccess) {
      static_cast<void>(cudaGetLastError());
      fail_allocation("cudaMalloc", bytes, cudaGetErrorString(status));
    }
    return memory;
  }
  /// May wait for the device to be idle.
  void deallocate(void* memory, std::size_t /*bytes*/) const noexcept {
    if (memory == nullptr) return;
    detail::log_cuda_error(cudaSetDevice(ordinal_), "cudaSetDevice");
    detail::log_cuda_error(cudaFree(memory), "cudaFree");
  }

  /// Page-locked host memory, which copies asynchronously and at full speed.
  /// @throws ResourceError
  void* allocate_pinned(std::size_t bytes) const {
    if (bytes == 0) return nullptr;
    make_current();
    void* memory = nullptr;
    if (auto const status = cudaHostAlloc(&memory, bytes, cudaHostAllocPortable); status != cudaSuccess) {
      static_cast<void>(cudaGetLastError());
      fail<ResourceError>("cuda:{}: cudaHostAlloc of {} bytes failed: {}", ordinal_, bytes, cudaGetErrorString(status));
    }
    return memory;
  }
  /// Returns memory of allocate_pinned; nullptr: does nothing.
  void deallocate_pinned(void* memory) const noexcept {
    if (memory == nullptr) return;
    detail::log_cuda_error(cudaSetDevice(ordinal_), "cudaSetDevice");
    detail::log_cuda_error(cudaFreeHost(memory), "cudaFreeHost");
  }

  /// Enqueues a copy; each side is host or device memory. @throws VendorError if CUDA refuses it
  void copy_async(Stream& stream, void* to, void const* from, std::size_t bytes) const {
    if (bytes == 0 || to == from) return;
    make_current();
    FSDP_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream.get()));
  }
  /// Enqueues the zeroing of device memory. @throws VendorError if CUDA refuses it
  void zero_async(Stream& stream, void* to, std::size_t bytes) const {
    if (bytes == 0) return;
    make_current();
    FSDP_CUDA_CHECK(cudaMemsetAsync(to, 0, bytes, stream.get()));
  }

  /// Marks the end of the work that `stream` has so far; may be called again for the same event.
  void record(Event& event, Stream& stream) const {
    make_current();
    FSDP_CUDA_CHECK(cudaEventRecord(event.get(), stream.get()));
    event.recorded_.store(true, std::memory_order_relaxed);
  }
  /// @throws UsageError if the event was never recorded
  void wait(Stream& stream, Event const& event, WaitSite site = WaitSite::none) const {
    FSDP_EXPECTS(event.recorded(), "cuda:{}: a stream waits ({}) for an event that was never recorded", ordinal_,
                 fsdp::name(site));
    make_current();
    FSDP_CUDA_CHECK(cudaStreamWaitEvent(stream.get(), event.get(), 0));
  }
  /// Blocks until the stream's work is done.
  /// @throws VendorError if that work failed
  void synchronize(Stream& stream) const {
    make_current();
    FSDP_CUDA_CHECK(cudaStreamSynchronize(stream.get()));
  }
  /// Blocks until all work of the device is done that this process has given it, whatever becomes of it.
  void synchronize_all() const noexcept {
    detail::log_cuda_error(cudaSetDevice(ordinal_), "cudaSetDevice");
    detail::log_cuda_error(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  /// Blocks until the event's latest record is reached. Not while its stream is being captured into a graph.
  /// @throws VendorError if work before it failed; UsageError if `event` was never recorded
  void synchronize(Event const& event) const {
    FSDP_EXPECTS(event.recorded(), "cuda:{}: the host waits for an event that was never recorded", ordinal_);
    make_current();
    FSDP_CUDA_CHECK(cudaEventSynchronize(event.get()));
  }
  /// Whether the event's latest record is done. Does not block.
  bool is_done(Event const& event) const {
    FSDP_EXPECTS(event.recorded(), "cuda:{}: is_done was called with an event that was never recorded", ordinal_);
    make_current();
    auto const status = cudaEventQuery(event.get());
    if (status == cudaErrorNotReady) {
      static_cast<void>(cudaGetLastError());
      return false;
    }
    FSDP_CUDA_CHECK(status);
    return true;
  }
  /// Time between the records of two timed events, both done.
  float elapsed_milliseconds(Event const& start, Event const& stop) const {
    make_current();
    float milliseconds = 0;
    FSDP_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, start.get(), stop.get()));
    return milliseconds;
  }

  /// Runs `Kernel{}(CudaBlock{}, index, args...)` for every index in [0, blocks), at most 2^31 - 1, in a block of its
  /// own, each with `Kernel::threads` threads (256 unless declared), `Kernel::shared_bytes` of shared memory
  /// (block.shared(); none unless declared) and, where `Kernel::blocks_per_multiprocessor` is declared, registers for
  /// as many blocks at once. Needs nvcc: in a translation unit of another compiler it is declared, but does not compile
  /// when called.
  /// @throws VendorError if the launch is refused
  template <class Kernel, class... Args>
  void launch(Stream& stream, std::int64_t blocks, Kernel /*kernel*/, Args... args) const {
    static_assert(std::is_empty_v<Kernel> && std::is_default_constructible_v<Kernel>,
                  "a kernel is a stateless functor");
    static_assert((std::is_trivially_copyable_v<Args> && ...),
                  "kernel arguments are copied to the device byte by byte");
#if defined(__CUDACC__) || defined(FSDP_CUDA_STANDIN)
    FSDP_EXPECTS(blocks >= 0, "cuda:{}: expected 0 or more blocks for a kernel, got {}", ordinal_, blocks);
    if (blocks == 0) return;
    make_current();
    FSDP_CUDA_CHECK((detail::launch_kernel<Kernel>(stream.get(), blocks, args...)));
#else
    static_assert(sizeof(Kernel) == 0, "cuda::Device::launch needs nvcc: compile this file as CUDA");
    static_cast<void>(stream);
    static_cast<void>(blocks);
    (static_cast<void>(args), ...);
#endif
  }

  /// Free and total bytes of the device, now.
  DeviceMemory memory() const {
    make_current();
    DeviceMemory bytes;
    FSDP_CUDA_CHECK(cudaMemGetInfo(&bytes.free, &bytes.total));
    return bytes;
  }
  /// "cuda:0 NVIDIA H200 (compute 9.0, 139.8 GiB)".
  std::string description() const {
    cudaDeviceProp properties{};
    FSDP_CUDA_CHECK(cudaGetDeviceProperties(&properties, ordinal_));
    return formatted("cuda:{} {} (compute {}.{}, {:.1f} GiB)", ordinal_, properties.name, properties.major,
                     properties.minor, static_cast<double>(properties.totalGlobalMem) / (1024.0 * 1024.0 * 1024.0));
  }

  /// Throws a ResourceError that names the bytes wanted, free and there. @param call  the function that has failed
  [[noreturn]] void fail_allocation(std::string_view call, std::size_t bytes, std::string_view reason) const {
    DeviceMemory there;
    if (cudaMemGetInfo(&there.free, &there.total) != cudaSuccess) static_cast<void>(cudaGetLastError());
    fail<ResourceError>("cuda:{}: {} of {} bytes failed: {} ({} of {} bytes are free)", ordinal_, call, bytes, reason,
                        there.free, there.total);
  }

 private:
  Event make_event(bool timed) const {
    make_current();
    cudaEvent_t event = nullptr;
    FSDP_CUDA_CHECK(cudaEventCreateWithFlags(&event, timed ? cudaEventDefault : cudaEventDisableTiming));
    return Event(UniqueEvent(event));
  }

  static void warn_of_one_connection() {
    static bool const warned = [] {
      char const* const connections = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
      if (connections == nullptr || std::string_view(connections) != "1") return false;
      std::fputs(
          "fsdp: warning: CUDA_DEVICE_MAX_CONNECTIONS=1 puts all streams into one hardware queue: communication "
          "will not overlap compute\n",
          stderr);
      return true;
    }();
    static_cast<void>(warned);
  }

  int ordinal_;
  DeviceOptions options_;
};

static_assert(fsdp::Device<Device>);

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::cuda
