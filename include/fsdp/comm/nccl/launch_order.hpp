// SPDX-License-Identifier: Apache-2.0
// The order in which collectives of several communicators start on one device.
#pragma once

#include <cuda_runtime_api.h>
#include <stdlib.h>

#include <cstdlib>
#include <map>
#include <mutex>

#include "fsdp/cuda/handles.hpp"

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
