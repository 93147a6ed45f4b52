// SPDX-License-Identifier: Apache-2.0
// State of a process that its ranks share: cores, machine, deadline, signals.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "transformer/launch/exit.hpp"
#include "transformer/launch/job.hpp"
#include "transformer/run/choices.hpp"
#include "transformer/run/table.hpp"

namespace transformer {

/// A name that processes of this machine have in common, and those of others have not.
std::string machine_name();

/// Where hybrid_shard has been told no shard groups, and there are several machines: the ranks of each are one.
/// @param nodes  for each rank, something that ranks of one machine have in common
/// @throws fsdp::ConfigError if machines differ in their ranks
void choose_shard_group(Job& job, std::vector<int> const& nodes);

/// How long a rank waits for its peers: the setting of that name, at least 1 ms.
std::chrono::milliseconds collective_timeout(Settings const& settings);

/// The iteration that training has come to, for the message that SIGTERM leaves behind; -1 before.
inline std::atomic<std::int64_t> current_iteration{-1};

/// Prints a line on standard error for each former name of a setting that was used, on the first process alone.
void print_former_names(Settings const& settings);

/// `train`, `bench` and `sample`: chooses device, world and strategy. Not to be called inside a try block: an exception
/// of a rank under MPI must end the run before stacks are unwound.
int run_on_ranks(Settings const& settings, Command command, CommandLine line);

/// Versions of the compiler, BLAS, MPI, CUDA and NCCL in this build, a line each.
std::string version_text();

}  // namespace transformer
