// SPDX-License-Identifier: Apache-2.0
// Runs one thing for many seeds in child processes, so that the parent can name the seed at which one died.
#pragma once

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>
#include <string>
#include <thread>

#include "fsdp/error.hpp"

namespace fsdp::testing {

struct Seeds {
  std::uint64_t first = 0, count = 1;
  std::uint64_t per_child = 50;
  unsigned limit_s = 120;  ///< for one seed; then its process is ended
};

namespace detail {

/// Waits for a child. Ends it where `progress()` returns the same value for `limit_s` seconds of this process's own
/// counting: while a virtual machine is stopped its clocks go on, and neither child nor parent runs.
/// @return the child's status as waitpid() gives it
template <class Progress>
int wait_for(pid_t child, unsigned limit_s, Progress const& progress) {
  constexpr unsigned ticks_per_s = 200;
  auto last = progress();
  for (unsigned ticks = 0;; ++ticks) {
    int status = 0;
    if (::waitpid(child, &status, WNOHANG) == child) return status;
    if (auto const now = progress(); now != last) last = now, ticks = 0;
    if (ticks == limit_s * ticks_per_s) ::kill(child, SIGALRM);
    std::this_thread::sleep_for(std::chrono::milliseconds(1000 / ticks_per_s));
  }
}

}  // namespace detail

/// Calls `run(seed)` for all seeds, and `tell(seed, text)` where it returns a text, throws, or ends its process. What a
/// seed writes to stderr is kept for that case.
/// @return how many seeds that were
template <class Run, class Tell>
std::uint64_t each_seed(Seeds seeds, Run const& run, Tell const& tell) {
  struct Shared {
    std::atomic<std::uint64_t> next{0}, told{0};
  };
  void* const memory = ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) fail<ResourceError>("no memory to share with a child process");
  auto* const shared = new (memory) Shared;
  shared->next = seeds.first;
  auto* const log = std::tmpfile();
  if (log == nullptr) fail<ResourceError>("no temporary file");
  auto const logged = [&] {
    std::string text(4000, '\0');
    auto const bytes = ::pread(::fileno(log), text.data(), text.size(), 0);
    return text.substr(0, bytes > 0 ? static_cast<std::size_t>(bytes) : 0);
  };
  auto const report = [&](std::uint64_t seed, std::string const& text) {
    ++shared->told;
    tell(seed, text);
    std::fflush(stdout);
  };
  auto const end = seeds.first + seeds.count;
  while (shared->next < end) {
    auto const last = std::min(end, shared->next + seeds.per_child);
    std::fflush(stdout);
    auto const child = ::fork();
    if (child < 0) fail<ResourceError>("cannot start a child process");
    if (child == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      ::fcntl(::fileno(log), F_SETFL, O_APPEND);
      ::dup2(::fileno(log), STDERR_FILENO);
      for (; shared->next < last; ++shared->next) {
        auto const seed = shared->next.load();
        if (::ftruncate(STDERR_FILENO, 0) != 0) std::abort();
        try {
          if (std::string const text = run(seed); !text.empty()) report(seed, text);
        } catch (std::exception const& error) {
          report(seed, error.what());
        }
      }
      std::exit(0);
    }
    int const status = detail::wait_for(child, seeds.limit_s, [&] { return shared->next.load(); });
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) continue;
    report(shared->next,
           fmt::format("the process was ended by {} {}:\n{}", WIFSIGNALED(status) ? "signal" : "exit code",
                       WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status), logged()));
    ++shared->next;
  }
  auto const told = shared->told.load();
  ::munmap(memory, sizeof(Shared));
  std::fclose(log);
  return told;
}

}  // namespace fsdp::testing
