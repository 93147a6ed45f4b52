// SPDX-License-Identifier: Apache-2.0
// Reads from the environment how this process was started, and chooses how ranks start.
#include "transformer/launch/environment.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <cstdlib>
#include <exception>
#include <limits>
#include <set>
#include <sstream>

#include "fsdp/error.hpp"
#include "fsdp/host.hpp"
#include "transformer/launch/exit.hpp"
#include "transformer/launch/program.hpp"

namespace transformer {
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

/// @throws fsdp::ConfigError saying what to do unless `comm` is what moves data between such ranks
void expect_comm(Launch const& launch, std::string_view device, std::string_view comm) {
  bool const host = device == "cpu", several = launch.several();
  if (comm == "nccl" && host)
    fsdp::fail<fsdp::ConfigError>(
        "setting 'comm': nccl connects GPUs, but the device is cpu; expected --device=cuda, --comm=mpi (processes "
        "under mpirun) or --comm=local (threads)");
  if (comm == "mpi" && !host)
    fsdp::fail<fsdp::ConfigError>(
        "setting 'comm': mpi connects processes on the host, but the device is cuda; expected --comm=nccl for "
        "processes with GPUs, or --device=cpu");
  if (comm == "nccl" && !several && !launch.mpi && !launch.named)
    fsdp::fail<fsdp::ConfigError>(
        "setting 'comm': nccl connects processes with one GPU each; start them with mpirun -n N, srun or torchrun, or "
        "use local for threads that share a GPU (--ranks=N)");
  if (comm == "mpi" && !several && !launch.mpi)
    fsdp::fail<fsdp::ConfigError>(
        "setting 'comm': mpi connects processes; start them with mpirun -n N or srun, or use local for threads of one "
        "process (--ranks=N)");
  if (comm == "local" && several)
    fsdp::fail<fsdp::ConfigError>(
        "setting 'comm': local connects threads of one process, but {} has started several processes; expected "
        "--comm={}, or --ranks=N without {}",
        starter(launch), host ? "mpi" : "nccl", starter(launch));
}

/// Advice in messages, for fewer GPUs than ranks.
constexpr std::string_view sharing = "--share_gpu=true lets several ranks share a GPU";

/// Advice in messages, for processes without MPI.
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
  auto const value = [&](std::string_view name) {
    auto const found = variables.find(name);
    return found == variables.end() ? std::string() : found->second;
  };
  for (auto const* const name : {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"})
    if (auto const rank = value(name); !rank.empty()) return rank == "0";
  // Before Slurm's: torchrun's agents may be tasks of a step. A RANK alone is nobody's.
  if (auto const rank = value("RANK"); !rank.empty() && !value("WORLD_SIZE").empty()) return rank == "0";
  auto const task = value("SLURM_PROCID");
  return task.empty() || task == "0";
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
    fsdp::fail<fsdp::ConfigError>("RANK and WORLD_SIZE must both be set, but {} is not set",
                                  rank < 0 ? "RANK" : "WORLD_SIZE");
  if (rank >= size) fsdp::fail<fsdp::ConfigError>("RANK={}: expected a number below WORLD_SIZE={}", rank, size);
  if (!launch.mpi) return launch;
  auto const [mpi_rank, mpi_size] = *launch.mpi;
  if ((mpi_rank >= 0 && mpi_rank != rank) || (mpi_size > 0 && mpi_size != size))
    fsdp::fail<fsdp::ConfigError>(
        "RANK and WORLD_SIZE say rank {} of {}, but mpirun says rank {} of {}; unset RANK and WORLD_SIZE, or start the "
        "ranks without mpirun",
        rank, size, mpi_rank, mpi_size == 0 ? std::string("an unknown number") : fmt::format("{}", mpi_size));
  return launch;
}

WorldKind choose_world(Launch const& launch, Build build, std::string_view device, std::int64_t ranks,
                       std::string_view comm) {
  bool const several = launch.several();
  if (ranks > 1 && (launch.mpi || several))
    fsdp::fail<fsdp::ConfigError>("setting 'ranks': expected 1 under {}, which starts the ranks itself, got {}",
                                  starter(launch), ranks);
  expect_comm(launch, device, comm);
  if (comm == "local") return WorldKind::threads;
  if (device == "cpu") {
    if (build.mpi && (launch.mpi || (several && !launch.named))) return WorldKind::mpi;
    if (!several) return WorldKind::threads;
    if (launch.named && !launch.mpi)
      fsdp::fail<fsdp::ConfigError>(
          "RANK and WORLD_SIZE say rank {} of {}, which works with --device=cuda only; on the host use mpirun, or "
          "--ranks=N for threads",
          launch.named->rank, launch.named->size);
    fsdp::fail<fsdp::ConfigError>(
        "this program was built without MPI, so it cannot be one of several processes; use --ranks=N for threads");
  }
  if (!several && comm != "nccl") return WorldKind::threads;
  if (!build.nccl)
    fsdp::fail<fsdp::ConfigError>(
        "this program was built without NCCL, so several processes cannot train together on GPUs; use --ranks=N for "
        "threads that share one GPU");
  if (build.mpi && (launch.mpi || !launch.named)) return WorldKind::nccl_by_mpi;
  if (launch.named) return WorldKind::nccl_by_variables;
  fsdp::fail<fsdp::ConfigError>(
      "this program was built without MPI, which the processes of {} need to find each other: {}", starter(launch),
      variables_to_set);
}

std::string describe(WorldKind kind, std::int64_t size, std::size_t gpus) {
  auto const processes = fmt::format("{} process{}", size, size == 1 ? "" : "es");
  auto const own = size == 1 ? " with a GPU" : " with a GPU each";
  auto const on_gpus = gpus == 0 ? std::string(own) : fmt::format(" that share {} GPU{}", gpus, gpus == 1 ? "" : "s");
  switch (kind) {
    case WorldKind::mpi: return processes + " (MPI)";
    case WorldKind::nccl_by_mpi: return processes + on_gpus + " (NCCL, started by MPI)";
    case WorldKind::nccl_by_variables: return processes + on_gpus + " (NCCL, started by RANK and WORLD_SIZE)";
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
        "mpirun has started {} processes, but MPI finds {}: use the mpirun of the MPI library with which this program "
        "was built",
        started, size);
  fsdp::fail<fsdp::ConfigError>(
      "srun has started {} processes, but MPI finds {}: start srun with an MPI plugin (srun --mpi=pmix, or another "
      "that srun --mpi=list names), or use mpirun; on GPUs you can also {}",
      started, size, variables_to_set);
}

std::vector<int> nodes_of(std::vector<std::string> const& machines) {
  std::map<std::string_view, int> first;
  std::vector<int> nodes;
  for (std::size_t rank = 0; rank < machines.size(); ++rank)
    nodes.push_back(first.emplace(machines[rank], static_cast<int>(rank)).first->second);
  return nodes;
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

std::int64_t ranks_of_a_machine(std::vector<int> const& nodes) {
  std::map<int, std::int64_t> ranks;  // by machine
  for (auto const node : nodes) ++ranks[node];
  if (ranks.size() < 2) return 0;
  constexpr std::string_view instead =
      "start the same number of consecutive ranks on each machine, or choose a size with --shard_group=N";
  for (std::size_t rank = 1; rank < nodes.size(); ++rank) {
    auto const first = std::find(nodes.begin(), nodes.end(), nodes[rank]) - nodes.begin();
    auto const here = ranks[nodes[rank]], there = ranks[nodes[0]];
    if (here != there)
      fsdp::fail<fsdp::ConfigError>(
          "setting 'shard_group': hybrid_shard shards over the ranks of a machine, but the number of ranks differs: {} "
          "on the machine of rank 0, {} on the machine of rank {}; {}",
          there, here, rank, instead);
    if (static_cast<std::int64_t>(rank) - first >= here)
      fsdp::fail<fsdp::ConfigError>(
          "setting 'shard_group': hybrid_shard shards over the ranks of a machine, but ranks {} and {} are on one "
          "machine and ranks between them are on another; {}",
          first, rank, instead);
  }
  return ranks[nodes[0]];
}

int choose_gpu(Place rank, LocalPlace here, int gpus, bool share) {
  if (gpus < 1)
    fsdp::fail<fsdp::ConfigError>(
        "rank {}: expected a GPU for every rank, found none on this machine; use --device=cpu to train without GPUs",
        rank.rank);
  if (gpus == 1) return 0;
  if (here.rank < 0) {
    if (rank.size == 1) return 0;
    fsdp::fail<fsdp::ConfigError>(
        "rank {}: LOCAL_RANK is not set, and there are {} GPUs to choose from; set it to this rank's number on its "
        "machine, from 0 on",
        rank.rank, gpus);
  }
  if (share) return here.rank % gpus;
  if (here.rank < gpus && here.size <= gpus) return here.rank;
  if (here.size > gpus)
    fsdp::fail<fsdp::ConfigError>("rank {}: expected a GPU for every rank, got {} ranks on a machine with {} GPUs; {}",
                                  rank.rank, here.size, gpus, sharing);
  fsdp::fail<fsdp::ConfigError>(
      "rank {}: expected a GPU for every rank, got LOCAL_RANK={} on a machine with {} GPUs{}; {}", rank.rank, here.rank,
      gpus, here.size > 0 ? fmt::format(" and {} ranks", here.size) : std::string(), sharing);
}

std::string pack(ChosenGpu const& gpu) { return fmt::format("{} {} {}", gpu.place, gpu.seen, gpu.name); }

ChosenGpu unpack_gpu(std::string const& text) {
  ChosenGpu gpu;
  std::istringstream(text) >> gpu.place >> gpu.seen;
  gpu.name = text.substr(text.find(' ', text.find(' ') + 1) + 1);
  return gpu;
}

void expect_own_gpus(std::vector<ChosenGpu> const& gpus, std::vector<int> const& nodes) {
  std::map<std::string_view, std::size_t> owners;
  for (std::size_t rank = 0; rank < gpus.size(); ++rank) {
    auto const [owner, alone] = owners.emplace(gpus[rank].name, rank);
    if (alone) continue;
    auto const &first = gpus[owner->second], &second = gpus[rank];
    auto const both = fmt::format("expected a GPU for every rank, but ranks {} and {} have the same one ({})",
                                  owner->second, rank, second.name);
    if (first.seen == 1 && second.seen == 1) {
      std::set<std::string_view> here;
      for (std::size_t peer = 0; peer < gpus.size(); ++peer)
        if (nodes[peer] == nodes[rank]) here.insert(gpus[peer].name);
      fsdp::fail<fsdp::ConfigError>(
          "{}, and each of them sees this GPU alone: the {} ranks of their machine see {} GPU{} in total; start fewer "
          "ranks, let each rank see a GPU of its own (CUDA_VISIBLE_DEVICES), or start threads that share a GPU "
          "(--ranks=N without a launcher); {}",
          both, std::count(nodes.begin(), nodes.end(), nodes[rank]), here.size(), here.size() == 1 ? "" : "s", sharing);
    }
    if (first.place == second.place)
      fsdp::fail<fsdp::ConfigError>(
          "{}: both have LOCAL_RANK={}; expected a different number for each rank of a machine, from 0 on", both,
          second.place);
    fsdp::fail<fsdp::ConfigError>(
        "{}: rank {} has LOCAL_RANK={} and sees {} GPUs, rank {} has LOCAL_RANK={} and sees {}: set the same "
        "CUDA_VISIBLE_DEVICES on all ranks of a machine, or let each rank see a GPU of its own",
        both, owner->second, first.place, first.seen, rank, second.place, second.seen);
  }
}

std::string nccl_host(std::vector<std::string> const& gpus, int rank) {
  if (std::count(gpus.begin(), gpus.end(), gpus[static_cast<std::size_t>(rank)]) == 1) return {};
  return fmt::format("{}-rank-{}", program_name, rank);
}

void end_on_uncaught_exceptions(int rank) {
  static int own = 0;
  own = rank;
  std::set_terminate([] {
    fsdp::host::yield_to_end();
    report_error(fsdp::detail::uncaught_text(own));
    std::_Exit(EXIT_FAILURE);
  });
}

}  // namespace transformer
