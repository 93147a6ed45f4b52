// SPDX-License-Identifier: Apache-2.0
// Reads from the environment how this process was started, and chooses how ranks start. Needs neither MPI nor a GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace transformer {

/// Variables of an environment. One that is not there and one that is empty are the same.
using Variables = std::map<std::string, std::string, std::less<>>;

/// The variables of this process that read_launch() reads.
Variables launch_variables();

/// A process's place in a run, as far as its launcher says.
struct Place {
  int rank = -1;  ///< -1: not said
  int size = 0;   ///< 0: not said
};

/// Whether this process is the first of those that mpirun or srun has started, or alone: it does the work of commands
/// that take one process.
bool is_first_process(Variables const& variables);

/// Launchers that a process's environment shows. There may be several: mpirun inside a job step, say.
struct Launch {
  std::optional<Place> mpi;    ///< of mpirun, or of srun with an MPI plugin: OMPI_COMM_WORLD_*, PMI_*, PMIX_RANK
  std::optional<Place> named;  ///< RANK and WORLD_SIZE, as torchrun sets them
  std::optional<Place> step;   ///< a task of srun: SLURM_PROCID, SLURM_STEP_NUM_TASKS

  /// Whether this process may be one of several.
  bool several() const;
};

/// @throws fsdp::ConfigError if a variable is malformed, one of RANK and WORLD_SIZE is missing, or they contradict
/// MPI's
Launch read_launch(Variables const& variables);

/// The libraries for several processes with which a program was built.
struct Build {
  bool mpi = false;
  bool nccl = false;
};

/// How the ranks of a run come about.
enum class WorldKind {
  threads,            ///< of this process, on the host or on one GPU; a run of one rank too
  mpi,                ///< processes on the host, over MPI
  nccl_by_mpi,        ///< processes with a GPU each, over NCCL; they find each other by MPI
  nccl_by_variables,  ///< the same; they find each other by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
};

/// [Note: Choice of the communicator] Threads of one process, on the host or on one GPU: local. Processes on the host:
/// mpi. Processes with GPUs: nccl. Each device and launcher has one, which `auto` takes.
/// Name it to be sure.
///
/// @param device  "cpu" or "cuda"
/// @param ranks   the setting: threads that this process is to run
/// @param comm    the setting: what is to move data: auto, nccl, local or mpi
/// @throws fsdp::ConfigError saying what to do where such ranks cannot work together
WorldKind choose_world(Launch const& launch, Build build, std::string_view device, std::int64_t ranks,
                       std::string_view comm = "auto");

/// How ranks came about, in words.
/// @param size  ranks
/// @param gpus  that processes have among them, if they share some; 0: each has its own
std::string describe(WorldKind kind, std::int64_t size, std::size_t gpus = 0);

/// @param size  the ranks that MPI has found
/// @throws fsdp::ConfigError if the launcher has started another number of processes
void expect_mpi_size(Launch const& launch, int size);

/// A process's place among the ranks of its machine.
struct LocalPlace {
  int rank = -1;  ///< -1: not said
  int size = 0;   ///< 0: not said
};

/// For each rank, the lowest rank on its machine.
/// @param machines  every rank's, by name
std::vector<int> nodes_of(std::vector<std::string> const& machines);

/// @param nodes  for each rank, something that ranks of one machine have in common
LocalPlace local_place(std::vector<int> const& nodes, int rank);

/// Ranks of a machine, where there are several machines: the shard group of hybrid_shard, unless one is given.
/// @param nodes  for each rank, something that ranks of one machine have in common
/// @return 0 if there is one machine
/// @throws fsdp::ConfigError unless all machines have as many, ranks that follow each other
std::int64_t ranks_of_a_machine(std::vector<int> const& nodes);

/// The ordinal of a rank's GPU: its place on its machine, or 0 where it sees one GPU, which may be another than its
/// neighbours' (CUDA_VISIBLE_DEVICES; expect_own_gpus finds out).
/// @param gpus   that this process sees
/// @param share  where there are more ranks than GPUs, ranks are dealt round over them
/// @throws fsdp::ConfigError if there is none for this rank, or no saying which
int choose_gpu(Place rank, LocalPlace here, int gpus, bool share);

/// A rank's GPU, and how it came to it.
struct ChosenGpu {
  std::string name;  ///< that no other GPU has
  int place = -1;    ///< the rank's on its machine, by LOCAL_RANK where that is set; -1: not said
  int seen = 1;      ///< GPUs that its process sees
};
/// Between ranks, as a text.
std::string pack(ChosenGpu const& gpu);
ChosenGpu unpack_gpu(std::string const& text);

/// @param gpus   every rank's
/// @param nodes  for each rank, something that ranks of one machine have in common
/// @throws fsdp::ConfigError naming the first two ranks that have one GPU, how they came to it, and what to do
void expect_own_gpus(std::vector<ChosenGpu> const& gpus, std::vector<int> const& nodes);

/// A value of NCCL_HOSTID for a rank that shares its GPU: NCCL refuses two ranks of one machine on one GPU.
/// @param gpus  every rank's GPU, by a name that no other GPU has
/// @return a name that no other rank gets; "" if the rank has its GPU for itself: then the machine is what it is
std::string nccl_host(std::vector<std::string> const& gpus, int rank);

/// From now on an exception of this process that nothing catches is reported, and ends the process before any stack is
/// unwound: destructors of streams would wait for peers that wait for this rank. Nothing is reported if a wait that has
/// failed is ending the process already.
void end_on_uncaught_exceptions(int rank);

}  // namespace transformer
