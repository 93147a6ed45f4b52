// SPDX-License-Identifier: Apache-2.0
// Declarations shared by the CUDA translation units of the step benchmark.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "fsdp/cuda.hpp"

namespace bench {

/// Bytes of the device's L2 cache.
inline std::size_t l2_cache(fsdp::cuda::Device const& device) {
  int bytes = 0;
  FSDP_CUDA_CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrL2CacheSize, device.ordinal()));
  return static_cast<std::size_t>(bytes);
}

}  // namespace bench
