// SPDX-License-Identifier: Apache-2.0
// Entry points for each device, in translation units of their own.
#pragma once

#include "settings.hpp"

namespace bench {

void run_host(StepSettings const& settings);      ///< host.cpp
void run_cuda(StepSettings const& settings);      ///< cuda.cu; checks the device
void kernels_cuda(StepSettings const& settings);  ///< kernels_cuda.cu

}  // namespace bench
