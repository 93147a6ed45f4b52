// SPDX-License-Identifier: Apache-2.0
// The step in bfloat16 on the host.
#include "fsdp/host.hpp"
#include "run.hpp"
#include "step.hpp"
#include "transformer/math/gemm_host.hpp"

namespace bench {

void step_host_bf16(StepSettings const& settings, std::string const& device_name) {
  run_step<fsdp::Bf16>(fsdp::host::Device{}, device_name, host_cache(), settings);
}

}  // namespace bench
