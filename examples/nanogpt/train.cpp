// SPDX-License-Identifier: Apache-2.0
// nanogpt train and bench: chooses the device, how ranks come about, and the strategy.
#include "train.hpp"

#include <cblas.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "commands.hpp"
#include "dispatch.hpp"
#include "fsdp/error.hpp"
#include "fsdp/host/device.hpp"
#if NANOGPT_HAVE_MPI
#include "fsdp/comm/mpi.hpp"
#endif
#if NANOGPT_HAVE_CUDA
#include "train_cuda.hpp"
#endif

namespace nanogpt {
namespace {

constexpr std::array<char const*, 3> launcher_variables{"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"};

/// Whether mpirun or srun started this process as one of a run's ranks.
bool under_launcher() {
  return std::any_of(launcher_variables.begin(), launcher_variables.end(),
                     [](char const* variable) { return std::getenv(variable) != nullptr; });
}

int number_from_environment(char const* variable, int otherwise) {
  char const* const text = std::getenv(variable);
  int const value = text == nullptr ? 0 : std::atoi(text);
  return value > 0 ? value : otherwise;
}

/// Says that the run is asked to stop, and lets every wait of the library end the process.
extern "C" void on_sigterm(int) {
  std::array<char, 96> text{};
  std::size_t length = 0;
  auto const put = [&](char const* words) {
    for (; *words != '\0' && length < text.size(); ++words) text[length++] = *words;
  };
  put("nanogpt: SIGTERM");
  if (auto iteration = current_iteration.load(std::memory_order_relaxed); iteration >= 0) {
    std::array<char, 24> digits{};
    auto at = digits.size() - 1;
    do {
      digits[--at] = static_cast<char>('0' + iteration % 10);
      iteration /= 10;
    } while (iteration != 0);
    put(" at iteration ");
    put(digits.data() + at);
  }
  put(": stopping\n");
  if (::write(STDERR_FILENO, text.data(), length) < 0) std::_Exit(fsdp::host::wait_terminated_exit_code);
  fsdp::host::request_termination();
}

void handle_sigterm() {
  struct sigaction action {};
  action.sa_handler = on_sigterm;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;
  ::sigaction(SIGTERM, &action, nullptr);
}

int run_local(Job const& job) {
#if NANOGPT_HAVE_CUDA
  if (job.device == "cuda") return run_cuda_threads(job);
#endif
  return run_threads(job, fsdp::host::Device{});
}

}  // namespace

std::string choose_device(Settings const& settings) {
#if NANOGPT_HAVE_CUDA
  bool const present = cuda_device_count() > 0;
  if (settings.device.empty()) return present ? "cuda" : "cpu";
  if (settings.device == "cuda" && !present)
    fsdp::fail<fsdp::ConfigError>("setting 'device': expected a machine with a CUDA GPU for cuda, found none; use --device=cpu");
#else
  if (settings.device == "cuda")
    fsdp::fail<fsdp::ConfigError>("setting 'device': this program was built without CUDA: expected cpu, got cuda");
#endif
  return settings.device.empty() ? "cpu" : settings.device;
}

std::string choose_dtype(Settings const& settings, std::string const& device) {
  bool const host = device == "cpu";
  if (settings.dtype.empty()) return host ? "float32" : "bfloat16";
  if (host && settings.dtype != "float32")
    fsdp::fail<fsdp::ConfigError>("setting 'dtype': expected float32, the one type that cpu computes in, got {}",
                                  settings.dtype);
  if (settings.dtype == "float16")
    fsdp::fail<fsdp::ConfigError>(
        "setting 'dtype': float16 needs loss scaling, which nanogpt does not have yet: expected bfloat16 or float32, "
        "got float16");
  return settings.dtype;
}

void divide_cores(int ranks_here) {
  if (std::getenv("OPENBLAS_NUM_THREADS") != nullptr) return;
  auto const cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  openblas_set_num_threads(std::max(1, cores / std::max(1, ranks_here)));
}

void report_error(std::string const& text) {
  auto const line = fmt::format("nanogpt: error: {}\n", text);
  std::fflush(stdout);
  std::fwrite(line.data(), 1, line.size(), stderr);
}

int run_training(Settings const& settings, Command command, CommandLine line) {
  Job job{settings, command, {}, {}, {}};
  bool const launched = under_launcher();
  try {
    job.device = choose_device(settings);
    job.dtype = choose_dtype(settings, job.device);
    if (launched && settings.ranks > 1)
      fsdp::fail<fsdp::ConfigError>("setting 'ranks': expected 1 under mpirun, which starts the ranks itself, got {}", settings.ranks);
#if !NANOGPT_HAVE_MPI
    if (number_from_environment("OMPI_COMM_WORLD_SIZE", 1) > 1 || number_from_environment("PMI_SIZE", 1) > 1)
      fsdp::fail<fsdp::ConfigError>("this program was built without MPI and cannot be one of several ranks; --ranks=N runs threads");
#endif
    auto const seconds = std::chrono::duration<double>(std::min(settings.collective_timeout, 1e8));
    fsdp::host::set_wait_deadline(
        std::max(std::chrono::nanoseconds(1), std::chrono::duration_cast<std::chrono::nanoseconds>(seconds)));
  } catch (std::exception const& error) {
    report_error(error.what());
    return usage_error;
  }
  handle_sigterm();
#if NANOGPT_HAVE_MPI
  if (launched && job.device == "cpu") {
    divide_cores(number_from_environment("OMPI_COMM_WORLD_LOCAL_SIZE", number_from_environment("PMI_SIZE", 1)));
    return fsdp::mpi::run(line.argc, line.argv, [&](fsdp::mpi::Environment const& environment) {
      fsdp::mpi::Options options;
      options.timeout = std::max(std::chrono::milliseconds(1),
                                 std::chrono::duration_cast<std::chrono::milliseconds>(fsdp::host::wait_deadline()));
      job.world_kind = fmt::format("{} processes (MPI)", environment.size());
      return dispatch(World<fsdp::host::Device>::of(fsdp::mpi::Communicator(environment, {}, options)), job);
    });
  }
#else
  static_cast<void>(line);
#endif
  if (job.device == "cuda" && launched && number_from_environment("OMPI_COMM_WORLD_SIZE", 1) > 1) {
    report_error("setting 'device': this version runs several ranks on GPUs as threads only (--ranks=N without mpirun)");
    return usage_error;
  }
  divide_cores(static_cast<int>(settings.ranks));
  job.world_kind = settings.ranks == 1 ? "one process" : fmt::format("{} threads of one process", settings.ranks);
  return guarded([&] { return run_local(job); });
}

}  // namespace nanogpt
