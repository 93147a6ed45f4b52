// SPDX-License-Identifier: Apache-2.0
// Entry points for each device and type, in translation units of their own.
#pragma once

#include <string>

#include "settings.hpp"

namespace bench {

void run_host(StepSettings const& settings);                                        ///< host.cpp
void step_host_bf16(StepSettings const& settings, std::string const& device_name);  ///< where there is oneDNN
void run_cuda(StepSettings const& settings);        ///< cuda.cu: checks the device, then one of those below
void step_cuda_bf16(StepSettings const& settings);  ///< step_cuda_bf16.cu
void step_cuda_fp32(StepSettings const& settings);  ///< step_cuda_fp32.cu
void kernels_cuda(StepSettings const& settings);    ///< kernels_cuda.cu

}  // namespace bench
