// SPDX-License-Identifier: Apache-2.0
// Starts the ranks of train, bench and sample: chooses device and communicator; handles signals.
#include "transformer/launch/process.hpp"

#include <cblas.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "fsdp/communicator.hpp"
#include "fsdp/error.hpp"
#include "fsdp/host.hpp"
#include "transformer/launch/cores.hpp"
#include "transformer/launch/dispatch.hpp"
#include "transformer/launch/element_type.hpp"
#include "transformer/launch/environment.hpp"
#include "transformer/launch/exit.hpp"
#include "transformer/launch/job.hpp"
#include "transformer/launch/machine.hpp"
#include "transformer/launch/refusals.hpp"
#include "transformer/launch/stop_vote.hpp"
#include "transformer/math/blas.hpp"
#include "transformer/math/fp32_products.hpp"
#include "transformer/report/metrics.hpp"
#if TRANSFORMER_HAVE_MPI
#include "fsdp/mpi.hpp"
#endif
#if TRANSFORMER_HAVE_CUDA
#include "transformer/launch/gpu_ranks.hpp"
#endif
#if TRANSFORMER_HAVE_ONEDNN
#include "transformer/launch/program.hpp"
#include "transformer/math/bf16_products.hpp"
#endif

namespace transformer {
namespace {

/// A line on stderr that begins with the program's name. For signal handlers.
class SignalLine {
 public:
  SignalLine() { put(program_name); }
  void put(std::string_view words) {
    for (char const letter : words)
      if (length_ < text_.size()) text_[length_++] = letter;
  }
  bool write() const { return ::write(STDERR_FILENO, text_.data(), length_) >= 0; }

 private:
  std::array<char, 128> text_{};
  std::size_t length_ = 0;
};

/// Writes "nanogpt: SIGTERM at iteration 12: stopping", with the program's name. For signal handlers.
/// @param what  follows, as "stopping"
/// @return false: nobody can read it
bool say_signal(char const* signal, char const* what) {
  SignalLine line;
  line.put(": ");
  line.put(signal);
  if (auto iteration = current_iteration.load(std::memory_order_relaxed); iteration >= 0) {
    std::array<char, 24> digits{};
    auto at = digits.size() - 1;
    do {
      digits[--at] = static_cast<char>('0' + iteration % 10);
      iteration /= 10;
    } while (iteration != 0);
    line.put(" at iteration ");
    line.put(digits.data() + at);
  }
  line.put(": ");
  line.put(what);
  line.put("\n");
  return line.write();
}

/// Says that the run is asked to stop, and lets every wait of the library say where it stands and end the process. For
/// signal handlers.
void stop_at_once(char const* signal) {
  if (!say_signal(signal, "stopping")) std::_Exit(fsdp::host::wait_terminated_exit_code);
  fsdp::host::request_termination(signal);
  itimerval const soon{{}, {0, 300'000}};  // a rank that computes waits for nothing
  ::setitimer(ITIMER_REAL, &soon, nullptr);
}

extern "C" void on_sigalrm(int) { std::_Exit(fsdp::host::wait_terminated_exit_code); }
extern "C" void on_sigterm(int) { stop_at_once("SIGTERM"); }

/// Whether this process says for all that a signal has come.
bool speaks_of_signals = false;
/// This process is a rank of Open MPI's mpirun.
bool under_mpirun = false;

/// While mpirun ends a run it reads nothing, and a rank that prints would wait for it. So standard output goes nowhere.
void drop_output() {
  launcher_ends_run = true;
  if (int const nowhere = ::open("/dev/null", O_WRONLY | O_CLOEXEC); nowhere >= 0) ::dup2(nowhere, STDOUT_FILENO);
}

/// The first signal asks training to save and stop after a step. The second stops it at once. Before training has begun
/// there is nothing to save: the first ends the process, unless it is SIGUSR1.
extern "C" void on_request_to_stop(int signal, siginfo_t* info, void*) {
  if (under_mpirun && signal != SIGUSR1 && info->si_pid == ::getppid()) drop_output();
  auto const* const name = signal == SIGINT ? "SIGINT" : signal == SIGTERM ? "SIGTERM" : "SIGUSR1";
  bool const training = current_iteration.load(std::memory_order_relaxed) >= 0;
  if (!training && signal != SIGUSR1) {
    if (speaks_of_signals) static_cast<void>(say_signal(name, "stopping before the first step; nothing was saved"));
    std::_Exit(fsdp::host::wait_terminated_exit_code);
  }
  if (stop_requested.exchange(true)) return stop_at_once(name);
  // mpirun kills its ranks soon, also one that waits for a peer that is lost: each says where it is.
  if (launcher_ends_run)
    static_cast<void>(say_signal(name, "saving after this step, then stopping (mpirun allows about 1 s)"));
  else if (speaks_of_signals)
    static_cast<void>(say_signal(name, "saving after this step, then stopping; a second signal stops at once"));
}

/// A page of a mapped file is no longer there: another program has cut it while it was read.
extern "C" void on_sigbus(int) {
  SignalLine line;
  line.put(": error: a file of tokens or weights has become shorter while it was read (SIGBUS)\n");
  static_cast<void>(line.write());
  std::_Exit(EXIT_FAILURE);
}

void handle_signals(Command command) {
  struct sigaction action {};
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;
  action.sa_handler = on_sigterm;
  ::sigaction(SIGTERM, &action, nullptr);
  action.sa_handler = on_sigalrm;
  ::sigaction(SIGALRM, &action, nullptr);
  action.sa_handler = on_sigbus;
  ::sigaction(SIGBUS, &action, nullptr);
  if (command == Command::sample) {  // has nothing to save, and ends in order where its text is read no further
    action.sa_handler = SIG_IGN;
    ::sigaction(SIGPIPE, &action, nullptr);
    return;
  }
  if (command != Command::train) return;  // has nothing to save either
  under_mpirun = std::getenv("OMPI_COMM_WORLD_RANK") != nullptr;
  speaks_of_signals = is_first_process(launch_variables());
  action.sa_flags |= SA_SIGINFO;
  action.sa_sigaction = on_request_to_stop;
  for (int const signal : {SIGINT, SIGTERM, SIGUSR1}) ::sigaction(signal, &action, nullptr);
}

/// The device to compute on: the setting, or what the build and the machine offer.
/// @throws fsdp::ConfigError if the build or the machine lacks the device that is asked for
std::string choose_device(Settings const& settings) {
#if TRANSFORMER_HAVE_CUDA
  bool const present = cuda_device_count() > 0;
  if (settings.device.empty()) return present ? "cuda" : "cpu";
  if (settings.device == "cuda" && !present)
    fsdp::fail<fsdp::ConfigError>(
        "setting 'device': expected a machine with a CUDA GPU for cuda, found none; use --device=cpu");
#else
  if (settings.device == "cuda")
    fsdp::fail<fsdp::ConfigError>("setting 'device': this program was built without CUDA: expected cpu, got cuda");
#endif
  return settings.device.empty() ? "cpu" : settings.device;
}

/// OpenBLAS chooses its kernels as it is loaded. Where they leave the processor's wider vectors idle and nobody has
/// chosen them, starts this program again with others; if that fails, the run's first lines warn.
void choose_blas_kernels(CommandLine line) {
  if (std::getenv("OPENBLAS_CORETYPE") != nullptr || !blas_info().wider_idle) return;
  if (::setenv("OPENBLAS_CORETYPE", "SkylakeX", 1) != 0) return;
  constexpr char const* self = "/proc/self/exe";
  std::error_code error;
  auto const file = std::filesystem::read_symlink(self, error);
  if (!error) ::execv(file.c_str(), line.argv);  // by this name, for a process is called what its file is
  ::execv(self, line.argv);                      // the file is no longer there
}

constexpr Build build{TRANSFORMER_HAVE_MPI != 0, TRANSFORMER_HAVE_NCCL != 0};

int run_as_threads(Job const& job) {
#if TRANSFORMER_HAVE_CUDA
  if (job.device == "cuda") return run_gpu_threads(job);
#endif
  return run_threads(job, fsdp::host::Device{job.threads});
}

/// Threads of a rank: the setting, or its part of the machine.
/// @param cores  of every rank on the machine; `rank` is an index
int threads_of(Settings const& settings, std::vector<std::vector<int>> const& cores, std::size_t rank) {
  if (settings.threads > 0) return static_cast<int>(settings.threads);
  return std::min(part_of_cores(cores, rank, processor_quota()), 256);
}

#if TRANSFORMER_HAVE_MPI
/// Threads of a rank of MPI's world. @note Collective: yes.
int threads_of(Settings const& settings, fsdp::mpi::Environment const& environment) {
  auto const mine = allowed_cores();
  auto const ranks = static_cast<std::size_t>(environment.size());
  std::vector<int> counts(ranks), starts(ranks);
  int const own = static_cast<int>(mine.size());
  MPI_Allgather(&own, 1, MPI_INT, counts.data(), 1, MPI_INT, MPI_COMM_WORLD);
  std::exclusive_scan(counts.begin(), counts.end(), starts.begin(), 0);
  std::vector<int> all(static_cast<std::size_t>(starts.back() + counts.back()));
  MPI_Allgatherv(mine.data(), own, MPI_INT, all.data(), counts.data(), starts.data(), MPI_INT, MPI_COMM_WORLD);
  auto const nodes = environment.nodes();
  std::vector<std::vector<int>> here;
  std::size_t place = 0;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    if (nodes[rank] != nodes[static_cast<std::size_t>(environment.rank())]) continue;
    if (static_cast<int>(rank) == environment.rank()) place = here.size();
    auto const first = all.begin() + starts[rank];
    here.emplace_back(first, first + counts[rank]);
  }
  return threads_of(settings, here, place);
}

/// This process as a rank of MPI's world.
int run_under_mpi(Job& job, WorldKind kind, Launch const& launch, CommandLine line) {
  int const code = fsdp::mpi::run(line.argc, line.argv, [&](fsdp::mpi::Environment const& environment) {
    int const refused = guarded([&] {
      expect_mpi_size(launch, environment.size());
      return EXIT_SUCCESS;
    });
    if (refused != EXIT_SUCCESS) return refused;
    job.world_kind = describe(kind, environment.size());
    job.threads = threads_of(job.settings, environment);
    fsdp::mpi::Options options;
    options.timeout = collective_timeout(job.settings);
    auto world = fsdp::AnyCommunicator<fsdp::host::Device>(
        fsdp::mpi::Communicator(environment, fsdp::host::Device{job.threads}, options));
    try {
      expect_same_device(world, job);
      take_fastest_type(job, [&](std::string const& mine) { return world.exchange(mine, "rates of products"); });
      if (kind == WorldKind::mpi)
        agree(world, [&] { choose_shard_group(job, environment.nodes(options.ranks_per_node)); });
    } catch (AgreedError const& error) {
      return refuse(world.rank(), job, error.what());
    }
#if TRANSFORMER_HAVE_NCCL
    if (kind == WorldKind::nccl_by_mpi) return run_gpu_process(world, environment.nodes(), job);
#endif
    return dispatch(std::move(world), job);
  });
  // mpirun reports any other code as a failure, although it has asked for the end itself.
  return code == saved_and_stopped && launcher_ends_run ? EXIT_SUCCESS : code;
}
#endif

}  // namespace

std::string version_text() {
#if defined(__clang__)
  std::string const compiler = "clang " __clang_version__;
#else
  std::string const compiler = "g++ " __VERSION__;
#endif
  std::string text = fmt::format("{} of fsdp {}\ncompiler: {}\nBLAS: {} ({} kernels)\n", program_name,
                                 TRANSFORMER_VERSION, compiler, openblas_get_config(), openblas_get_corename());
  text += fmt::format("fp32 on cpu: {}\n",
                      has_fp32_products() ? fmt::format("{}'s AVX-512 kernels", program_name) : std::string("BLAS"));
#if TRANSFORMER_HAVE_ONEDNN
  text += fmt::format("bf16 on cpu: {} (oneDNN {})\n",
                      bf16_units().empty() ? "not supported by this processor" : bf16_units(), onednn_version());
#else
  text += "bf16 on cpu: not built in\n";
#endif
#if TRANSFORMER_HAVE_MPI
  std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> mpi{};
  int length = 0;
  MPI_Get_library_version(mpi.data(), &length);
  text += fmt::format("MPI: {}\n", mpi.data());
#else
  text += "MPI: not built in\n";
#endif
  std::string cuda = "not built in", nccl = "not built in";
#if TRANSFORMER_HAVE_CUDA
  cuda = cuda_version();
#endif
#if TRANSFORMER_HAVE_NCCL
  nccl = nccl_version();
#endif
  return text + fmt::format("CUDA: {}\nNCCL: {}", cuda, nccl);
}

std::string machine_name() {
  std::string boot;  // machines may have one name, and containers of one machine several
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return host_name() + " " + boot;
}

void choose_shard_group(Job& job, std::vector<int> const& nodes) {
  if (job.settings.strategy != "hybrid_shard" || job.settings.shard_group != 0) return;
  job.settings.shard_group = ranks_of_a_machine(nodes);
  job.settings.chosen.emplace_back("shard_group");
  if (job.settings.shard_group != 0)
    job.world_kind += fmt::format(" in shard groups of {}, a machine each", job.settings.shard_group);
}

std::chrono::milliseconds collective_timeout(Settings const& settings) {
  std::chrono::duration<double> const seconds(std::min(settings.collective_timeout, 1e8));
  return std::max(std::chrono::milliseconds(1), std::chrono::duration_cast<std::chrono::milliseconds>(seconds));
}

void print_former_names(Settings const& settings) {
  if (!is_first_process(launch_variables())) return;
  for (auto const& note : notes_on_former_names(settings)) fmt::print(stderr, "{}\n", note);
}

int run_on_ranks(Settings const& settings, Command command, CommandLine line) {
  choose_blas_kernels(line);
  print_former_names(settings);  // not before, or a program that was started again would print them twice
  Job job{settings, command, {}, {}, {}, {}};
  Launch launch;
  WorldKind kind{};
  int const refused = guarded([&] {
    job.device = choose_device(settings);
    choose_dtype(job, take_settings_of_run(job.settings, command));
    launch = read_launch(launch_variables());
    kind = choose_world(launch, build, job.device, settings.ranks, settings.comm);
#if TRANSFORMER_HAVE_MPI
    if (kind == WorldKind::mpi || kind == WorldKind::nccl_by_mpi) fsdp::mpi::expect_pmi();
#endif
    fsdp::host::set_wait_deadline(collective_timeout(settings));
    return EXIT_SUCCESS;
  });
  if (refused != EXIT_SUCCESS) return refused;
  handle_signals(command);
#if TRANSFORMER_HAVE_MPI
  if (kind == WorldKind::mpi || kind == WorldKind::nccl_by_mpi) return run_under_mpi(job, kind, launch, line);
#endif
#if TRANSFORMER_HAVE_NCCL
  if (kind == WorldKind::nccl_by_variables) {
    end_on_uncaught_exceptions(launch.named->rank);
    return run_gpu_process_by_variables(job);
  }
#endif
  job.threads =
      threads_of(settings, std::vector<std::vector<int>>(static_cast<std::size_t>(settings.ranks), allowed_cores()), 0);
  job.world_kind = describe(kind, settings.ranks);
  return guarded([&] {
    take_fastest_type(job, [](std::string const& mine) { return std::vector{mine}; });  // for all ranks
    return run_as_threads(job);
  });
}

}  // namespace transformer
