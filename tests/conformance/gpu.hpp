// SPDX-License-Identifier: Apache-2.0
// Tests that need a GPU: without one the program says so in one line and exits with 77, which ctest counts as skipped.
#pragma once

#include <fcntl.h>
#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "fsdp/bootstrap.hpp"
#include "fsdp/cuda.hpp"

namespace fsdp::testing {

inline constexpr int skipped = 77;

/// Call it from the initialiser of a namespace-scope constant: it runs before main().
inline bool need_gpu() {
  auto const reason = cuda::unavailable_reason();
  if (reason.empty()) return true;
  std::printf("%s\n", reason.c_str());
  std::fflush(stdout);
  std::_Exit(skipped);
}

namespace detail {

inline std::vector<std::string> split_at_zeros(std::string const& text) {
  std::vector<std::string> parts;
  for (std::size_t begin = 0; begin < text.size();) {
    auto const end = text.find('\0', begin);
    parts.push_back(text.substr(begin, end - begin));
    if (end == std::string::npos) break;
    begin = end + 1;
  }
  return parts;
}
inline std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (auto& text : texts) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

}  // namespace detail

/// Starts this program again, once per rank, with the environment that a launcher gives, and that lets NCCL run several
/// ranks on one GPU; then exits with the first code that is not zero. In the processes so started, returns at once.
inline bool need_ranks(int ranks) {
  if (std::getenv("RANK") != nullptr) return true;
  need_gpu();
  int const port = bootstrap::listen_on("127.0.0.1", 0).local_port();
  int const gpus = cuda::device_count();
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  auto arguments = detail::split_at_zeros({std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()});
  std::vector<pid_t> processes;
  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<std::string> variables;
    auto const add = [&](std::string const& text) { variables.push_back(text); };
    add(fmt::format("RANK={}", rank));
    add(fmt::format("WORLD_SIZE={}", ranks));
    add(fmt::format("LOCAL_RANK={}", rank % gpus));
    add("MASTER_ADDR=127.0.0.1");
    add(fmt::format("MASTER_PORT={}", port));
    if (gpus < ranks) {
      add(fmt::format("NCCL_HOSTID=r{}", rank));  // NCCL refuses two ranks of one host on one GPU
      for (char const* setting :
           {"NCCL_NET=Socket", "NCCL_SOCKET_IFNAME=lo", "NCCL_IB_DISABLE=1", "NCCL_NET_PLUGIN=none",
            "NCCL_TUNER_PLUGIN=none", "NCCL_NVLS_ENABLE=0", "NCCL_MNNVL_ENABLE=0", "NCCL_RAS_ENABLE=0",
            "NCCL_ALGO=Ring", "NCCL_PROTO=Simple", "NCCL_MAX_CTAS=4"})
        add(setting);
    }
    for (char** entry = environ; *entry != nullptr; ++entry)
      variables.emplace_back(*entry);  // the first of a name counts
    posix_spawn_file_actions_t actions;
    ::posix_spawn_file_actions_init(&actions);
    if (rank > 0) ::posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
    pid_t process = 0;
    auto argument_pointers = detail::pointers(arguments);
    auto variable_pointers = detail::pointers(variables);
    int const error = ::posix_spawn(&process, "/proc/self/exe", &actions, nullptr, argument_pointers.data(),
                                    variable_pointers.data());
    ::posix_spawn_file_actions_destroy(&actions);
    if (error != 0) {
      std::fprintf(stderr, "cannot start rank %d\n", rank);
      std::_Exit(EXIT_FAILURE);
    }
    processes.push_back(process);
  }
  int code = EXIT_SUCCESS;
  for (auto const process : processes) {
    int status = 0;
    ::waitpid(process, &status, 0);
    int const ended = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    if (code == EXIT_SUCCESS) code = ended;
  }
  std::fflush(stdout);
  std::_Exit(code);
}

}  // namespace fsdp::testing
