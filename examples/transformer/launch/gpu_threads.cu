// SPDX-License-Identifier: Apache-2.0
// Ranks that are threads of one process and share a GPU.
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <string>

#include "fsdp/cuda.hpp"
#include "transformer/launch/dispatch.hpp"
#include "transformer/launch/gpu_ranks.hpp"

namespace transformer {

std::string cuda_version() { return fmt::format("{}.{}", CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10); }

int cuda_device_count() { return fsdp::cuda::device_count(); }

int run_gpu_threads(Job const& job) { return run_threads(job, fsdp::cuda::Device{}); }

}  // namespace transformer
