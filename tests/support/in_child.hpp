// SPDX-License-Identifier: Apache-2.0
// For tests of what ends a process: it runs in a child.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <string>

#include "tests/catch.hpp"

namespace fsdp::testing {

/// How a process ended.
struct ChildOutcome {
  int code = -1;     ///< its exit code; -1: a signal ended it
  std::string text;  ///< what it wrote to stderr
};

/// Runs `action` in a child process, which ends with code 0 if `action` returns.
template <class Action>
ChildOutcome in_child(Action const& action) {
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  auto const child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    ::close(ends[0]);
    ::dup2(ends[1], STDERR_FILENO);
    action();
    std::_Exit(0);
  }
  ::close(ends[1]);
  ChildOutcome outcome;
  char part[512];
  for (ssize_t got = 0; (got = ::read(ends[0], part, sizeof part)) > 0;)
    outcome.text.append(part, static_cast<std::size_t>(got));
  ::close(ends[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  if (WIFEXITED(status)) outcome.code = WEXITSTATUS(status);
  return outcome;
}

}  // namespace fsdp::testing
