// SPDX-License-Identifier: Apache-2.0
// Runs one thing for many seeds in child processes, so that the parent can name the seed at which one died.
#pragma once

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>
#include <string>

#include "fsdp/error.hpp"

namespace fsdp::testing {

struct Seeds {
  std::uint64_t first = 0, count = 1;
  std::uint64_t per_child = 50;
};

/// Calls `run(seed)` for all seeds, and `tell(seed, text)` where it returns a text, throws, or ends its process.
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
      for (; shared->next < last; ++shared->next) {
        auto const seed = shared->next.load();
        try {
          if (std::string const text = run(seed); !text.empty()) report(seed, text);
        } catch (std::exception const& error) {
          report(seed, error.what());
        }
      }
      std::exit(0);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) continue;
    report(shared->next, WIFSIGNALED(status) ? fmt::format("the process was ended by signal {}", WTERMSIG(status))
                                             : fmt::format("the process ended with code {}", WEXITSTATUS(status)));
    ++shared->next;
  }
  auto const told = shared->told.load();
  ::munmap(memory, sizeof(Shared));
  return told;
}

}  // namespace fsdp::testing
