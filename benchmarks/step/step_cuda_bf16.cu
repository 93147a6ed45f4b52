// SPDX-License-Identifier: Apache-2.0
// The step in bfloat16 on a GPU.
#include "cuda.hpp"
#include "run.hpp"
#include "step.hpp"
#include "transformer/math/gemm_cuda.hpp"

namespace bench {

void step_cuda_bf16(StepSettings const& settings) {
  fsdp::cuda::Device const device;
  run_step<fsdp::Bf16>(device, device.description(), l2_cache(device), settings);
}

}  // namespace bench
