// SPDX-License-Identifier: Apache-2.0
// How a single-source kernel is launched on CUDA. Only for nvcc.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "fsdp/cuda/block.hpp"

namespace fsdp::cuda::detail {

/// Threads per block: `Kernel::threads` if declared, else 256.
template <class Kernel>
inline constexpr int threads_per_block = 256;
template <class Kernel>
requires requires { Kernel::threads; }
inline constexpr int threads_per_block<Kernel> = Kernel::threads;

template <class Kernel, class... Args>
__global__ void __launch_bounds__(threads_per_block<Kernel>) run_kernel(std::int64_t blocks, Args... args) {
  for (std::int64_t index = blockIdx.x; index < blocks; index += gridDim.x) {
    // More indices than a grid may hold: the block's shared scratch must be free before it is used again.
    if (index >= gridDim.x) __syncthreads();
    Kernel{}(CudaBlock{}, index, args...);
  }
}

/// @pre blocks > 0, and the stream's device is current
template <class Kernel, class... Args>
cudaError_t launch_kernel(cudaStream_t stream, std::int64_t blocks, Args... args) {
  static_assert(
      threads_per_block<Kernel> > 0 && threads_per_block<Kernel> <= 1024 && threads_per_block<Kernel> % 32 == 0,
      "a block has whole warps, 32 to 1024 threads");
  constexpr std::int64_t largest_grid = std::numeric_limits<std::int32_t>::max();
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(std::min(blocks, largest_grid)));
  config.blockDim = dim3(static_cast<unsigned>(threads_per_block<Kernel>));
  config.stream = stream;
  return cudaLaunchKernelEx(&config, run_kernel<Kernel, Args...>, blocks, args...);
}

}  // namespace fsdp::cuda::detail
