// SPDX-License-Identifier: Apache-2.0
// Starts runs on GPUs, for code that no CUDA compiler reads.
#pragma once

#include <string>
#include <vector>

#include "fsdp/communicator.hpp"
#include "fsdp/host.hpp"
#include "transformer/launch/environment.hpp"
#include "transformer/launch/job.hpp"

namespace transformer {

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
/// @param nodes    for each rank, something that ranks of one machine have in common
/// @return the exit code; usage_error on every rank if one of them has no GPU of its own, after rank 0 has said so
/// @note Collective: yes. In programs that were built with NCCL.
int run_gpu_process(fsdp::AnyCommunicator<fsdp::host::Device>& control, std::vector<int> const& nodes, Job job);

/// Runs this process as one rank over NCCL, for ranks that find each other by RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR
/// and MASTER_PORT.
/// @return usage_error also if a variable is missing or malformed, EXIT_FAILURE if a rank does not come; both are said
int run_gpu_process_by_variables(Job job);

}  // namespace transformer
