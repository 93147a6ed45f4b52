// SPDX-License-Identifier: Apache-2.0
// Launches single-source kernels on CUDA. Only for nvcc, and for tests that stand in for CUDA.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "fsdp/detail/cuda/block.hpp"
#include "fsdp/detail/cuda/hardware.hpp"

#if defined(FSDP_CUDA_STANDIN)
#include <fsdp_cuda_standin.hpp>  // of a test, which says what run_kernel is there
#endif

namespace fsdp::inline FSDP_VERSION_NAMESPACE::cuda::detail {

/// Blocks that a multiprocessor holds at once: `Kernel::blocks_per_multiprocessor` if declared, which bounds the
/// registers of a thread, else 0: no bound (1 would let the compiler take twice the registers).
template <class Kernel>
inline constexpr int blocks_per_multiprocessor = 0;
template <class Kernel>
requires requires { Kernel::blocks_per_multiprocessor; }
inline constexpr int blocks_per_multiprocessor<Kernel> = Kernel::blocks_per_multiprocessor;

#if !defined(FSDP_CUDA_STANDIN)
template <class Kernel, class... Args>
__global__ void __launch_bounds__(threads_per_block<Kernel>, blocks_per_multiprocessor<Kernel>)
    run_kernel(Args... args) {
  Kernel{}(ThreadBlock<Hardware>{}, std::int64_t{blockIdx.x}, args...);
}
#endif

/// Lets a kernel have more than 48 KiB of dynamic shared memory on the current device: once for each device.
template <class Kernel, class... Args>
cudaError_t raise_shared_limit() {
  constexpr std::size_t bytes = shared_bytes_per_block<Kernel>;
  if constexpr (bytes <= 48 * 1024) {
    return cudaSuccess;
  } else {
    static std::atomic<std::uint64_t> raised{0};  // a bit for each device
    int device = 0;
    if (auto const status = cudaGetDevice(&device); status != cudaSuccess) return status;
    std::uint64_t const bit = device < 64 ? std::uint64_t{1} << device : 0;
    if ((raised.load(std::memory_order_relaxed) & bit) != 0) return cudaSuccess;
    auto const status = cudaFuncSetAttribute(reinterpret_cast<void const*>(run_kernel<Kernel, Args...>),
                                             cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
    if (status == cudaSuccess) raised.fetch_or(bit, std::memory_order_relaxed);
    return status;
  }
}

/// @pre blocks > 0, and the stream's device is current
template <class Kernel, class... Args>
cudaError_t launch_kernel(cudaStream_t stream, std::int64_t blocks, Args... args) {
  static_assert(
      threads_per_block<Kernel> > 0 && threads_per_block<Kernel> <= 1024 && threads_per_block<Kernel> % 32 == 0,
      "a block has whole warps, 32 to 1024 threads");
  if (auto const status = raise_shared_limit<Kernel, Args...>(); status != cudaSuccess) return status;
  // No loop over a grid's worth of indices at a time: it would cost every kernel registers.
  if (blocks > std::numeric_limits<std::int32_t>::max()) return cudaErrorInvalidConfiguration;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads_per_block<Kernel>));
  config.dynamicSmemBytes = shared_bytes_per_block<Kernel>;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, run_kernel<Kernel, Args...>, args...);
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::cuda::detail
