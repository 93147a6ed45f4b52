// SPDX-License-Identifier: Apache-2.0
// The step, and its kernels, on the first GPU.
#include "fsdp/cuda.hpp"
#include "run.hpp"

namespace bench {

void run_cuda(StepSettings const& settings) {
  fsdp::cuda::require_device();
  if (settings.kernels) return kernels_cuda(settings);
  return settings.bf16() ? step_cuda_bf16(settings) : step_cuda_fp32(settings);
}

}  // namespace bench
