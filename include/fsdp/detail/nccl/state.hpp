// SPDX-License-Identifier: Apache-2.0
// Options of NCCL communicators, and their state: start and end, control plane, registered memory, and the order in
// which collectives of several communicators start on one device.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>
#include <stdlib.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/bootstrap.hpp"
#include "fsdp/communicator.hpp"
#include "fsdp/cuda.hpp"
#include "fsdp/detail/comm/messages.hpp"
#include "fsdp/detail/cuda/handles.hpp"
#include "fsdp/detail/nccl/watch.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::nccl::detail {

/// [Note: Several communicators on one device] The kernel of a collective holds multiprocessors while it waits for its
/// peers. Ranks that enqueue the collectives of all their communicators in one order can still hang: streams may start
/// them in another order on each rank, and where a GPU has no room for all of them at once, two ranks can each run the
/// collective that the other has not started. So collectives must also start in the order in which the host enqueued
/// them:
///  - NCCL 2.26 and newer do that where NCCL_LAUNCH_ORDER_IMPLICIT is 1. Kernels may still overlap.
///  - Below 2.26 LaunchOrder lets each collective wait for the end of the one that this process enqueued before it on
///    the device. Collectives of different communicators then do not overlap. Nothing is ordered while a stream is
///    captured into a graph.
/// A program that sets NCCL_LAUNCH_ORDER_IMPLICIT=0 turns both off. Source: NCCL User Guide, Environment Variables,
/// and Creating a Communicator, Using multiple NCCL communicators concurrently.

/// Sets NCCL_LAUNCH_ORDER_IMPLICIT=1 unless the environment has a value. NCCL reads it once, and setenv is not safe
/// beside other threads: hence a static initializer, which runs before main.
inline bool const launch_order_set = ::setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 0) == 0;

/// @return whether events order launches, with an NCCL of version `loaded`
inline bool orders_by_events(int loaded) {
  char const* const value = launch_order_set ? std::getenv("NCCL_LAUNCH_ORDER_IMPLICIT") : nullptr;
  return loaded < 22600 && (value == nullptr || std::strtoll(value, nullptr, 0) != 0);
}

/// Orders collectives of one device by events, in the order of calls to `enqueue`.
class LaunchOrder {
 public:
  static LaunchOrder& of(int device) {
    static auto& orders = *new Orders;  // outlives static communicators and the driver
    std::lock_guard const lock(orders.mutex);
    return orders.devices[device];
  }

  /// Calls `launch`, which enqueues a collective on `stream`.
  /// @pre the device is current
  /// @throws VendorError, and what `launch` throws
  template <class Launch>
  void enqueue(cudaStream_t stream, Launch const& launch) {
    auto capture = cudaStreamCaptureStatusNone;
    FSDP_CUDA_CHECK(cudaStreamIsCapturing(stream, &capture));
    if (capture != cudaStreamCaptureStatusNone) return launch();
    std::lock_guard const lock(mutex_);
    if (!last_) {
      cudaEvent_t made = nullptr;
      FSDP_CUDA_CHECK(cudaEventCreateWithFlags(&made, cudaEventDisableTiming));
      last_ = cuda::UniqueEvent(made);
    } else {
      FSDP_CUDA_CHECK(cudaStreamWaitEvent(stream, last_.get(), 0));
    }
    launch();
    FSDP_CUDA_CHECK(cudaEventRecord(last_.get(), stream));
  }

 private:
  struct Orders {
    std::mutex mutex;
    std::map<int, LaunchOrder> devices;
  };

  std::mutex mutex_;
  cuda::UniqueEvent last_;  // behind the last collective
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::nccl::detail

namespace fsdp::inline FSDP_VERSION_NAMESPACE::nccl {

/// Settings of a communicator and of those split from it. An option that NCCL, as compiled or as loaded, cannot honour
/// is an error.
struct Options {
  /// Longest time of a collective, a blocking call or a rank's arrival; after it, this rank reports and ends the run.
  std::chrono::milliseconds timeout = bootstrap::default_timeout();
  /// Compares every collective over the ranks before it is enqueued. For debugging: each one then blocks the host.
  bool check_order = false;
  /// `allocate` gives memory from NCCL, which `register_memory` makes a symmetric window of the communicator that moves
  /// it (NCCL 2.27 or newer); engines do so for their buffers.
  bool symmetric_memory = false;
  /// All-gathers within one node may run on copy engines instead of multiprocessors (NCCL 2.28 or newer, with
  /// symmetric_memory).
  bool copy_engines = false;
  int max_ctas = 0;  ///< most thread blocks that a collective takes from compute; 0: NCCL decides
};

/// Version of the NCCL that is loaded, as 22809 for 2.28.9. May differ from NCCL_VERSION_CODE, which was compiled
/// against.
inline int runtime_version() {
  int version = 0;
  FSDP_NCCL_CHECK(nullptr, ncclGetVersion(&version));
  return version;
}

namespace detail {

template <class T>
constexpr ncclDataType_t type_of() {
  switch (dtype_of<T>) {
    case DType::f32: return ncclFloat32;
    case DType::bf16: return ncclBfloat16;
    case DType::f16: return ncclFloat16;
    case DType::f64: return ncclFloat64;
    case DType::i64: return ncclInt64;
  }
  return ncclFloat32;
}

/// @throws ConfigError if the options need more than this NCCL has
inline void check_options(Options const& options) {
  auto const loaded = runtime_version();
  auto const require = [&](std::string_view option, int version) {
    if (loaded < version || NCCL_VERSION_CODE < version)
      fail<ConfigError>("nccl::Options::{} needs NCCL {}.{}; compiled against {}, loaded {}", option, version / 10000,
                        version / 100 % 100, NCCL_VERSION_CODE, loaded);
  };
  if (loaded < 21900) fail<ConfigError>("NCCL 2.19 or newer is needed; loaded {}", loaded);
  if (options.symmetric_memory) require("symmetric_memory", 22700);
  if (options.copy_engines) require("copy_engines", 22800);
  if (options.copy_engines && !options.symmetric_memory)
    fail<ConfigError>("nccl::Options::copy_engines needs symmetric_memory");
}

inline ncclConfig_t make_config(Options const& options) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 1;
  if (options.max_ctas > 0) config.maxCTAs = options.max_ctas;
#if defined(NCCL_CTA_POLICY_ZERO)
  if (options.copy_engines) config.CTAPolicy = NCCL_CTA_POLICY_ZERO;
#endif
  return config;
}

/// The state of a communicator: NCCL's handle, the watch over it, the control plane.
struct State {
  State(cuda::Device where, int place, int ranks, Options const& settings)
      : device(where), rank(place), size(ranks), options(settings), exceptions(std::uncaught_exceptions()) {
    if (size > 1)
      watch = std::make_unique<Watch>(formatted("rank {} of {} (cuda:{})", rank, size, device.ordinal()),
                                      device.ordinal(), options.timeout);
  }
  State(State const&) = delete;
  State& operator=(State const&) = delete;

  /// While an exception passes, peers may be lost: the communicator is aborted instead of being brought to an end.
  ~State() {
    try {
      auto const waiting = phase({.call = "the destruction of a communicator"});
      device.make_current();
#if NCCL_VERSION_CODE >= 22700
      while (!windows.empty()) end_window(windows.begin()->first);
#endif
      if (watch) watch->attach(nullptr);
      if (owned && std::uncaught_exceptions() > exceptions) {
        static_cast<void>(ncclCommAbort(owned.release()));
      } else {
        owned = UniqueComm();
      }
      device.deallocate(scratch, scratch_bytes);
    } catch (std::exception const& error) {
      cuda::detail::log_failure("destroying an NCCL communicator", error.what());
    }
  }

  void use(ncclComm_t made) {
    comm = made;
    order_by_events = detail::orders_by_events(runtime_version());
    if (watch) watch->attach(made);
  }
  /// Calls `launch`, which enqueues a collective on `stream`. See [Note: Several communicators on one device].
  template <class Launch>
  void enqueue(cudaStream_t stream, Launch const& launch) const {
    if (!order_by_events) return launch();
    detail::LaunchOrder::of(device.ordinal()).enqueue(stream, launch);
  }
  /// The calling thread blocks in `operation` until the result ends.
  Watch::Phase phase(comm::CallDescription const& operation) { return {watch.get(), operation}; }

  /// Makes the communicator. A group of one rank needs none.
  /// @param ranks  the same ones, over which rank 0 passes the identifier on
  template <class Control>
  void connect(Control& ranks) {
    detail::check_options(options);
    if (size == 1) return;
    device.make_current();
    ncclUniqueId id{};
    if (rank == 0) FSDP_NCCL_CHECK(nullptr, ncclGetUniqueId(&id));
    auto const bytes =
        comm::ask_first_rank(ranks, rank == 0 ? std::string(id.internal, sizeof(id.internal)) : std::string(),
                             "NCCL identifier", comm::text_of_first);
    if (bytes.size() != sizeof(id.internal)) fail<PeerError>("rank {}: rank 0 sent no NCCL identifier", rank);
    std::memcpy(id.internal, bytes.data(), sizeof(id.internal));
    auto config = detail::make_config(options);
    ncclComm_t made = nullptr;
    {
      auto const waiting = phase({.call = "ncclCommInitRankConfig"});
      FSDP_NCCL_CHECK(nullptr, ncclCommInitRankConfig(&made, size, id, rank, &config));
    }
    owned = UniqueComm(made);
    use(made);
  }

  std::vector<std::string> exchange(std::string const& text, std::string_view what) {
    if (control) return control->exchange(text, what);
    auto const ranks = static_cast<std::size_t>(size);
    struct Announcement {
      std::uint64_t bytes = 0;
      comm::Text what;
    };
    Announcement const mine{text.size(), comm::Text(what)};
    std::vector<Announcement> calls(ranks);
    gather(&mine, calls.data(), sizeof(mine), what);
    comm::expect_same_exchange(
        rank, size, [&](int peer) -> auto const& { return calls[static_cast<std::size_t>(peer)].what; },
        [](int peer) { return peer; });
    std::size_t longest = 0;
    for (auto const& call : calls) longest = std::max(longest, static_cast<std::size_t>(call.bytes));
    std::string own = text;
    own.resize(longest);
    std::string all(longest * ranks, '\0');
    if (longest > 0) gather(own.data(), all.data(), longest, what);
    std::vector<std::string> texts;
    for (std::size_t peer = 0; peer < ranks; ++peer)
      texts.push_back(all.substr(peer * longest, static_cast<std::size_t>(calls[peer].bytes)));
    return texts;
  }

  /// Gathers texts on rank 0, and sends its answer to all ranks: see comm::ask_first_rank.
  template <class Answer>
  std::string ask_first_rank(std::string const& text, std::string_view what, Answer const& answer) {
    if (control) return control->ask_first_rank(text, what, answer);
    return answer(exchange(text, what));
  }

  /// All-gathers `bytes` of host memory from each rank, on a stream of its own, as a part of exchange(text, what).
  void gather(void const* send, void* recv, std::size_t bytes, std::string_view what) {
    auto const waiting = phase(comm::CallDescription::exchange(what));
    if (!control_stream) control_stream.emplace(device.make_stream("fsdp exchange"));
    auto const total = bytes * static_cast<std::size_t>(size);
    if (total > scratch_bytes) {
      device.deallocate(std::exchange(scratch, nullptr), std::exchange(scratch_bytes, 0));
      scratch = device.allocate(total);
      scratch_bytes = total;
    }
    auto* const own = static_cast<std::byte*>(scratch) + static_cast<std::size_t>(rank) * bytes;
    device.copy_async(*control_stream, own, send, bytes);
    auto const stream = control_stream->get();
    enqueue(stream, [&] { FSDP_NCCL_CHECK(comm, ncclAllGather(own, scratch, bytes, ncclUint8, comm, stream)); });
    device.copy_async(*control_stream, recv, scratch, total);
    device.synchronize(*control_stream);
  }

  /// @return whether memory comes from NCCL, for windows. A group of one rank moves nothing
  bool symmetric() const { return options.symmetric_memory && size > 1; }

  void* allocate(std::size_t bytes) const {
    if (!symmetric() || bytes == 0) return device.allocate(bytes);
#if NCCL_VERSION_CODE >= 22700
    device.make_current();
    void* memory = nullptr;
    if (auto const status = ncclMemAlloc(&memory, window_bytes(bytes)); status != ncclSuccess) {
      static_cast<void>(cudaGetLastError());
      device.fail_allocation("ncclMemAlloc", window_bytes(bytes), ncclGetErrorString(status));
    }
    return memory;
#else
    fail<ConfigError>("nccl::Options::symmetric_memory needs NCCL 2.27 or newer");
#endif
  }
  void deallocate(void* memory, std::size_t bytes) noexcept {
    if (!symmetric() || memory == nullptr) return device.deallocate(memory, bytes);
#if NCCL_VERSION_CODE >= 22700
    cuda::detail::log_cuda_error(cudaSetDevice(device.ordinal()), "cudaSetDevice");
    end_window(memory);
    if (auto const status = ncclMemFree(memory); status != ncclSuccess)
      cuda::detail::log_failure("ncclMemFree", ncclGetErrorString(status));
#endif
  }

  /// Makes `memory` a window of this communicator.
  void register_memory(void* memory, std::size_t bytes) {
    if (!symmetric() || memory == nullptr) return;
    auto const other = ask_first_rank(
        std::to_string(bytes), "register memory", [](std::vector<std::string> const& texts) -> std::string {
          for (std::size_t peer = 1; peer < texts.size(); ++peer)
            if (texts[peer] != texts[0])
              return formatted("{} bytes on rank 0, {} on rank {}", texts[0], texts[peer], peer);
          return {};
        });
    if (!other.empty()) fail<ConfigError>("rank {}: symmetric memory must be equal on all ranks: {}", rank, other);
#if NCCL_VERSION_CODE >= 22700
    device.make_current();
    ncclWindow_t window = nullptr;
    auto const waiting = phase({.call = "ncclCommWindowRegister"});
    auto const status = detail::settle(
        ncclCommWindowRegister(comm, memory, window_bytes(bytes), &window, NCCL_WIN_COLL_SYMMETRIC), comm);
    if (status != ncclSuccess || window == nullptr)
      fail<ConfigError>("rank {}: NCCL cannot register symmetric memory here ({}): turn Options::symmetric_memory off",
                        rank, status == ncclSuccess ? "not supported between these GPUs" : ncclGetErrorString(status));
    windows.emplace(memory, window);
#endif
  }

#if NCCL_VERSION_CODE >= 22700
  /// Windows are whole pages. NCCL 2.27 has no name for their size.
  static std::size_t window_bytes(std::size_t bytes) {
#if defined(NCCL_WIN_REQUIRED_ALIGNMENT)
    constexpr std::size_t page = NCCL_WIN_REQUIRED_ALIGNMENT;
#else
    constexpr std::size_t page = 4096;
#endif
    return (bytes + page - 1) / page * page;
  }
  /// Ends the window of `memory`, if it has one in this communicator.
  void end_window(void* memory) noexcept {
    auto const entry = windows.find(memory);
    if (entry == windows.end()) return;
    auto const status = ncclCommWindowDeregister(comm, entry->second);
    if (status != ncclSuccess) cuda::detail::log_failure("ncclCommWindowDeregister", ncclGetErrorString(status));
    windows.erase(entry);
  }
#endif

  cuda::Device device;
  int rank;
  int size;
  Options options;
  int exceptions;                // in flight when this began
  std::unique_ptr<Watch> watch;  // none in a group of one rank
  std::optional<bootstrap::TcpGroup> control;
  UniqueComm owned;           // empty if adopted
  ncclComm_t comm = nullptr;  // owned or adopted
  bool order_by_events = false;
  std::optional<cudaStream_t> bound;
  std::uint64_t sequence = 0;
#if NCCL_VERSION_CODE >= 22700
  std::map<void*, ncclWindow_t> windows;  // memory that is registered here
#endif
  std::optional<cuda::Stream> control_stream;
  void* scratch = nullptr;
  std::size_t scratch_bytes = 0;
};

}  // namespace detail

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::nccl
