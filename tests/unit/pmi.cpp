// SPDX-License-Identifier: Apache-2.0
// skip-tsan
// A task of srun without PMI is told from every other process by its environment.
#include "fsdp/detail/comm/pmi.hpp"

#include <map>
#include <string>

#include "tests/catch.hpp"

namespace {

using Variables = std::map<std::string, std::string>;

Variables operator+(Variables left, Variables const& right) {
  left.insert(right.begin(), right.end());
  return left;
}

std::string missing(Variables const& variables) {
  return fsdp::comm::missing_pmi([&](char const* name) {
    auto const found = variables.find(name);
    return found == variables.end() ? std::string() : found->second;
  });
}

// As Slurm 22.05 sets them.
Variables const job{{"SLURM_JOB_ID", "7"}, {"SLURM_NTASKS", "4"}, {"SLURM_NNODES", "2"}};
Variables const batch_script = job + Variables{{"SLURM_PROCID", "0"}, {"SLURM_NODEID", "0"}};
Variables const task =
    job +
    Variables{{"SLURM_STEP_ID", "0"}, {"SLURM_PROCID", "2"}, {"SLURM_STEP_NUM_TASKS", "4"}, {"SLURM_LOCALID", "0"}};

}  // namespace

TEST_CASE("a task of srun without PMI gets a sentence with the option that is missing", "[pmi]") {
  CHECK(missing(task) ==
        "started by srun without MPI: this process is task 2 of 4 and cannot find the others; start srun with "
        "--mpi=pmix, or another plugin that srun --mpi=list names, or use mpirun");
  Variables const alone = job + Variables{{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}};
  CHECK_FALSE(missing(alone).empty());  // Open MPI does not start there either
  CHECK_FALSE(missing(task + Variables{{"PMIX_RANK", ""}}).empty());
  CHECK_FALSE(missing(task + Variables{{"SLURM_MPI_TYPE", "none"}, {"PMIX_VERSION", "4.2.2"}}).empty());
}

TEST_CASE("whoever has PMI, or was not started by srun, misses nothing", "[pmi]") {
  CHECK(missing({}).empty());
  CHECK(missing(job).empty());
  CHECK(missing(batch_script).empty());
  for (auto const& [name, text] : Variables{{"PMIX_RANK", "2"},
                                            {"PMIX_NAMESPACE", "slurm.pmix.7.0"},
                                            {"PMI_RANK", "2"},
                                            {"PMI_FD", "11"},
                                            {"PMI_PORT", "n0:40000"},
                                            {"PMI_CONTROL_PORT", "20000"},
                                            {"OMPI_COMM_WORLD_RANK", "0"},
                                            {"MV2_COMM_WORLD_RANK", "0"}}) {
    CAPTURE(name);
    CHECK(missing(task + Variables{{name, text}}).empty());
  }
}
