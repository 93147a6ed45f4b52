// SPDX-License-Identifier: Apache-2.0
// Single kernels on a GPU.
#include "cuda.hpp"
#include "kernels.hpp"
#include "run.hpp"
#include "transformer/math/gemm_cuda.hpp"

namespace bench {

void kernels_cuda(StepSettings const& settings) {
  fsdp::cuda::Device const device;
  if (settings.bf16()) return run_kernels<fsdp::bf16>(device, device.description(), l2_cache(device), settings);
  run_kernels<float>(device, device.description(), l2_cache(device), settings);
}

}  // namespace bench
