// SPDX-License-Identifier: Apache-2.0
// Who started this process, and what follows from it.
#include "launch.hpp"

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <cstddef>
#include <cstdlib>
#include <limits>

#include "fsdp/error.hpp"

namespace nanogpt {
namespace {

constexpr std::array<char const*, 9> names{
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "PMIX_RANK", "RANK", "WORLD_SIZE",
    "SLURM_PROCID",         "SLURM_STEP_NUM_TASKS"};

/// @return `otherwise` if the variable is not set
/// @throws fsdp::ConfigError unless it is a whole number from `least` on
int number(Variables const& variables, std::string_view name, int least, int otherwise) {
  auto const found = variables.find(name);
  if (found == variables.end() || found->second.empty()) return otherwise;
  auto const& text = found->second;
  int value = 0;
  auto const [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || value < least)
    fsdp::fail<fsdp::ConfigError>("{}='{}': expected a whole number from {} to {}", name, text, least,
                                  std::numeric_limits<int>::max());
  return value;
}

std::optional<Place> place(Variables const& variables, std::string_view rank, std::string_view size) {
  Place const found{number(variables, rank, 0, -1), number(variables, size, 1, 0)};
  if (found.rank < 0 && found.size == 0) return std::nullopt;
  return found;
}

/// Who starts the ranks, for messages.
std::string_view starter(Launch const& launch) { return launch.mpi ? "mpirun" : launch.named ? "torchrun" : "srun"; }

/// What makes processes find each other without MPI.
constexpr std::string_view variables_to_set =
    "set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for each of them, as torchrun does";

}  // namespace

Variables launch_variables() {
  Variables variables;
  for (char const* const name : names)
    if (char const* const text = std::getenv(name); text != nullptr) variables.emplace(name, text);
  return variables;
}

bool is_first_process(Variables const& variables) {
  for (auto const* const name : {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID"})
    if (auto const found = variables.find(name); found != variables.end() && !found->second.empty())
      return found->second == "0";
  return true;
}

bool Launch::several() const {
  if (mpi && mpi->size != 1) return true;
  if (named && named->size != 1) return true;
  return !mpi && !named && step && step->size > 1;
}

Launch read_launch(Variables const& variables) {
  Launch launch;
  launch.mpi = place(variables, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE");
  if (!launch.mpi) launch.mpi = place(variables, "PMI_RANK", "PMI_SIZE");
  if (!launch.mpi) launch.mpi = place(variables, "PMIX_RANK", "");
  launch.named = place(variables, "RANK", "WORLD_SIZE");
  // SLURM_NTASKS and SLURM_PROCID alone are in the environment of batch scripts too, which are no tasks of a step.
  launch.step = place(variables, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS");
  if (launch.step && launch.step->size == 0) launch.step.reset();
  if (!launch.named) return launch;
  auto const [rank, size] = *launch.named;
  if (launch.mpi && (rank < 0 || size == 0)) {
    launch.named.reset();  // MPI's launcher has said it all
    return launch;
  }
  if (rank < 0 || size == 0)
    fsdp::fail<fsdp::ConfigError>("RANK and WORLD_SIZE: {} is not set", rank < 0 ? "RANK" : "WORLD_SIZE");
  if (rank >= size) fsdp::fail<fsdp::ConfigError>("RANK={}: expected less than WORLD_SIZE, {}", rank, size);
  if (!launch.mpi) return launch;
  auto const [mpi_rank, mpi_size] = *launch.mpi;
  if ((mpi_rank >= 0 && mpi_rank != rank) || (mpi_size > 0 && mpi_size != size))
    fsdp::fail<fsdp::ConfigError>(
        "RANK and WORLD_SIZE say rank {} of {}, and mpirun says rank {} of {}: unset RANK and WORLD_SIZE, or start the "
        "ranks without mpirun",
        rank, size, mpi_rank, mpi_size == 0 ? std::string("some") : fmt::format("{}", mpi_size));
  return launch;
}

WorldKind choose_world(Launch const& launch, Build build, std::string_view device, std::int64_t ranks) {
  bool const several = launch.several();
  if (ranks > 1 && (launch.mpi || several))
    fsdp::fail<fsdp::ConfigError>("setting 'ranks': expected 1 under {}, which starts the ranks itself, got {}",
                                  starter(launch), ranks);
  if (device == "cpu") {
    if (build.mpi && (launch.mpi || (several && !launch.named))) return WorldKind::mpi;
    if (!several) return WorldKind::threads;
    if (launch.named && !launch.mpi)
      fsdp::fail<fsdp::ConfigError>(
          "RANK and WORLD_SIZE say rank {} of {}, but processes on the host are started by mpirun, and --ranks=N runs "
          "threads: expected one of these, or --device=cuda",
          launch.named->rank, launch.named->size);
    fsdp::fail<fsdp::ConfigError>(
        "this program was built without MPI and cannot be one of several ranks; --ranks=N runs threads");
  }
  if (!several) return WorldKind::threads;
  if (!build.nccl)
    fsdp::fail<fsdp::ConfigError>(
        "this program was built without NCCL: its processes cannot train on GPUs together; --ranks=N runs threads that "
        "share one");
  if (build.mpi && (launch.mpi || !launch.named)) return WorldKind::nccl_by_mpi;
  if (launch.named) return WorldKind::nccl_by_variables;
  fsdp::fail<fsdp::ConfigError>("this program was built without MPI, by which the processes of {} find each other: {}",
                                starter(launch), variables_to_set);
}

std::string describe(WorldKind kind, std::int64_t size) {
  auto const processes = fmt::format("{} process{}", size, size == 1 ? "" : "es");
  switch (kind) {
    case WorldKind::mpi: return processes + " (MPI)";
    case WorldKind::nccl_by_mpi: return processes + " with a GPU each (NCCL, started by MPI)";
    case WorldKind::nccl_by_variables: return processes + " with a GPU each (NCCL, started by RANK and WORLD_SIZE)";
    case WorldKind::threads: break;
  }
  return size == 1 ? "one process" : fmt::format("{} threads of one process", size);
}

void expect_mpi_size(Launch const& launch, int size) {
  bool const said_by_mpi = launch.mpi && launch.mpi->size > 0;  // PMIx says the rank alone
  int const started = said_by_mpi ? launch.mpi->size : launch.step ? launch.step->size : 0;
  bool const own_launcher = launch.mpi && !said_by_mpi && size > 1;  // inside a step, of as many ranks as it likes
  if (started == 0 || started == size || own_launcher) return;
  if (said_by_mpi)
    fsdp::fail<fsdp::ConfigError>(
        "mpirun has started {} processes, but MPI finds {}: expected the mpirun of the MPI that this program was built "
        "with",
        started, size);
  fsdp::fail<fsdp::ConfigError>(
      "srun has started {} processes, but MPI finds {}: expected an MPI plugin (srun --mpi=pmix, or as srun --mpi=list "
      "says), or mpirun; on GPUs, {}",
      started, size, variables_to_set);
}

LocalPlace local_place(std::vector<int> const& nodes, int rank) {
  LocalPlace here{0, 0};
  auto const own = static_cast<std::size_t>(rank);
  for (std::size_t peer = 0; peer < nodes.size(); ++peer) {
    if (nodes[peer] != nodes[own]) continue;
    ++here.size;
    if (peer < own) ++here.rank;
  }
  return here;
}

int choose_gpu(Place rank, LocalPlace here, int gpus) {
  if (gpus < 1) fsdp::fail<fsdp::ConfigError>("rank {}: expected a GPU for every rank, found none here", rank.rank);
  if (gpus == 1) return 0;
  if (here.rank < 0) {
    if (rank.size == 1) return 0;
    fsdp::fail<fsdp::ConfigError>("rank {}: LOCAL_RANK is not set, and there are {} GPUs to choose from", rank.rank,
                                  gpus);
  }
  if (here.rank < gpus && here.size <= gpus) return here.rank;
  if (here.size > 0)
    fsdp::fail<fsdp::ConfigError>("rank {}: expected a GPU for every rank, got {} ranks on a machine with {} GPUs",
                                  rank.rank, here.size, gpus);
  fsdp::fail<fsdp::ConfigError>("rank {}: expected a GPU for every rank, got LOCAL_RANK {} on a machine with {} GPUs",
                                rank.rank, here.rank, gpus);
}

void expect_own_gpus(std::vector<std::string> const& gpus) {
  std::map<std::string_view, std::size_t> owners;
  for (std::size_t rank = 0; rank < gpus.size(); ++rank) {
    auto const [owner, first] = owners.emplace(gpus[rank], rank);
    if (!first)
      fsdp::fail<fsdp::ConfigError>(
          "expected a GPU for every rank, but ranks {} and {} have the same one ({}): start fewer ranks, or run "
          "threads "
          "that share a GPU (--ranks=N without a launcher)",
          owner->second, rank, gpus[rank]);
  }
}

}  // namespace nanogpt
