// SPDX-License-Identifier: Apache-2.0
// Training on a GPU: ranks are threads of one process.
#include "train_cuda.hpp"

#include <cuda_runtime_api.h>

#include "dispatch.hpp"
#include "fsdp/cuda/device.hpp"

namespace nanogpt {

int cuda_device_count() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

int run_cuda_threads(Job const& job) { return run_threads(job, fsdp::cuda::Device{}); }

}  // namespace nanogpt
