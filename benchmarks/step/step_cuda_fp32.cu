// SPDX-License-Identifier: Apache-2.0
// The step in float32 on a GPU.
#include "cuda.hpp"
#include "run.hpp"
#include "step.hpp"
#include "transformer/math/gemm_cuda.hpp"

namespace bench {

void step_cuda_fp32(StepSettings const& settings) {
  fsdp::cuda::Device const device;
  run_step<fsdp::Fp32>(device, device.description(), l2_cache(device), settings);
}

}  // namespace bench
