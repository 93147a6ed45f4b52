// SPDX-License-Identifier: Apache-2.0
// The step on the first GPU.
#include "cuda.hpp"
#include "fsdp/cuda.hpp"
#include "run.hpp"
#include "step.hpp"
#include "transformer/math/gemm_cuda.hpp"

namespace bench {

void run_cuda(StepSettings const& settings) {
  fsdp::cuda::require_device();
  if (settings.kernels) return kernels_cuda(settings);
  fsdp::cuda::Device const device;
  if (settings.bf16()) return run_step<fsdp::Bf16>(device, device.description(), l2_cache(device), settings);
  run_step<fsdp::Fp32>(device, device.description(), l2_cache(device), settings);
}

}  // namespace bench
