// SPDX-License-Identifier: Apache-2.0
// Hardware functions of a thread in a CUDA thread block. For nvcc; its host pass gets stand-ins that never run.
#pragma once

#include <cstddef>

#include "fsdp/detail/cuda/block.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::cuda {

/// The Lanes of a GPU: see ThreadBlock.
struct Hardware {
  FSDP_HD static int thread() {
#if defined(__CUDA_ARCH__)
    return static_cast<int>(threadIdx.x);
#else
    return 0;
#endif
  }
  FSDP_HD static int threads() {
#if defined(__CUDA_ARCH__)
    return static_cast<int>(blockDim.x);
#else
    return 1;
#endif
  }
  FSDP_HD static void sync(SyncSite) {
#if defined(__CUDA_ARCH__)
    __syncthreads();
#endif
  }
  FSDP_HD static void sync_warp(SyncSite) {
#if defined(__CUDA_ARCH__)
    __syncwarp();
#endif
  }
  template <class T>
  FSDP_HD static T shuffle_xor(T value, [[maybe_unused]] int mask) {
#if defined(__CUDA_ARCH__)
    return __shfl_xor_sync(0xffffffffu, value, mask);
#else
    return value;
#endif
  }
  FSDP_HD static std::byte* shared() {
#if defined(__CUDA_ARCH__)
    extern __shared__ __align__(128) std::byte fsdp_block_shared[];
    return fsdp_block_shared;
#else
    return nullptr;
#endif
  }
};

/// The Block of CUDA.
using CudaBlock = ThreadBlock<Hardware>;

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::cuda
