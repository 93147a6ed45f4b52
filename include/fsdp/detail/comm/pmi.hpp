// SPDX-License-Identifier: Apache-2.0
// Detects tasks of Slurm that cannot find each other, because srun started them without an MPI plugin.
#pragma once

#include <cstdlib>
#include <string>
#include <string_view>

#include "fsdp/detail/base/format.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::comm {

/// Tells a task of srun without PMI from all other processes. MPI finds the other tasks by PMI; without it, Open MPI
/// ends a process inside MPI_Init, and MPICH takes each task for a run of its own.
/// @param variable  called with the name of an environment variable; returns its text, "" if it is not set
/// @return the error, as a sentence that says what to do; "" for a process that has PMI, or that srun has not started.
/// Batch scripts have variables of Slurm too, but are no tasks of srun.
template <class Lookup>
std::string missing_pmi(Lookup&& variable) {
  std::string const tasks(variable("SLURM_STEP_NUM_TASKS")), task(variable("SLURM_PROCID"));
  if (tasks.empty() || task.empty()) return {};
  // Variables of srun's plugins pmix and pmi2, of mpirun inside a step (Open MPI, MPICH, MVAPICH), and of Cray's
  // launcher.
  for (char const* const name : {"PMIX_RANK", "PMIX_NAMESPACE", "PMI_RANK", "PMI_FD", "PMI_PORT", "PMI_CONTROL_PORT",
                                 "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"})
    if (!std::string_view(variable(name)).empty()) return {};
  return formatted(
      "started by srun without MPI: this process is task {} of {} and cannot find the others; start srun with "
      "--mpi=pmix, or another plugin that srun --mpi=list names, or use mpirun",
      task, tasks);
}

/// The message for this process, if it is such a task; else "".
inline std::string missing_pmi() {
  return missing_pmi([](char const* name) -> std::string_view {
    char const* const text = std::getenv(name);
    return text == nullptr ? "" : text;
  });
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::comm
