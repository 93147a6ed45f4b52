// SPDX-License-Identifier: Apache-2.0
// Runs on GPUs, as seen from code that no CUDA compiler reads.
#pragma once

#include <string>

#include "fsdp/host/device.hpp"
#include "job.hpp"
#include "launch.hpp"
#include "world.hpp"

namespace nanogpt {

/// GPUs that this process can use; 0 without a driver.
int cuda_device_count();

/// Versions, for --version. NCCL's in programs that were built with it.
std::string cuda_version();
std::string nccl_version();

/// Runs the job's ranks as threads that share the first GPU. @return the highest exit code
int run_gpu_threads(Job const& job);

/// Runs this process as one rank of several, each with a GPU of its own, over NCCL. Not to be called inside a try
/// block.
/// @param control  the ranks, which agree over it before NCCL connects them
/// @param here     this rank's place on its machine
/// @return the exit code; usage_error on every rank if one of them has no GPU of its own, after rank 0 has said so
/// @note Collective: yes. In programs that were built with NCCL.
int run_gpu_process(World<fsdp::host::Device>& control, LocalPlace here, Job const& job);

/// The same for ranks that find each other by RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.
/// @throws fsdp::ConfigError if a variable is missing or malformed; fsdp::PeerError if a rank does not come
int run_gpu_process_by_variables(Job const& job);

}  // namespace nanogpt
