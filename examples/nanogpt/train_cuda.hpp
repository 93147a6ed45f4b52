// SPDX-License-Identifier: Apache-2.0
// Training on a GPU, as seen from code that no CUDA compiler reads.
#pragma once

#include "train.hpp"

namespace nanogpt {

/// GPUs that this process can use; 0 without a driver.
int cuda_device_count();

/// Runs the job's ranks as threads that share the first GPU. @return the highest exit code
int run_cuda_threads(Job const& job);

}  // namespace nanogpt
