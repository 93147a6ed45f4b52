// SPDX-License-Identifier: Apache-2.0
// Ranks that are threads of one process and share a GPU.
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <string>

#include "dispatch.hpp"
#include "fsdp/cuda/device.hpp"
#include "gpu_ranks.hpp"

namespace nanogpt {

std::string cuda_version() { return fmt::format("{}.{}", CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10); }

int cuda_device_count() { return fsdp::cuda::device_count(); }

int run_gpu_threads(Job const& job) { return run_threads(job, fsdp::cuda::Device{}); }

}  // namespace nanogpt
