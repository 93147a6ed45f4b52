// SPDX-License-Identifier: Apache-2.0
// The subcommands, and what they share.
#pragma once

#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>
#include <string>
#include <utility>

#include "fsdp/error.hpp"
#include "settings.hpp"

namespace nanogpt {

/// A process's command line, as MPI wants it too.
struct CommandLine {
  int argc;
  char** argv;
};

/// Each returns the exit code of the process. Problems that the user can mend are fsdp::Error.
int run_prepare(Settings const& settings);
int run_export(Settings const& settings);
int run_report(Settings const& settings);
/// `train`, `bench` and `sample`: chooses device, world and strategy. Not to be called inside a try block: an exception
/// of a rank under MPI must end the run before stacks are unwound.
int run_on_ranks(Settings const& settings, Command command, CommandLine line);

/// What the program was built with, a line each: compiler, BLAS, MPI, CUDA, NCCL.
std::string version_text();

/// Prints "nanogpt: error: ..." to stderr in one piece.
inline void report_error(std::string const& text) {
  auto const line = fmt::format("nanogpt: error: {}\n", text);
  std::fflush(stdout);
  std::fwrite(line.data(), 1, line.size(), stderr);
}

/// Exit code of what the user can mend by other settings.
inline constexpr int usage_error = 2;

/// Runs `body` and reports what it throws.
/// @return what `body` returns; usage_error after a fsdp::ConfigError, EXIT_FAILURE after anything else
template <class Body>
int guarded(Body&& body) {
  try {
    return std::forward<Body>(body)();
  } catch (fsdp::ConfigError const& error) {
    report_error(error.what());
    return usage_error;
  } catch (std::bad_alloc const&) {
    report_error("out of memory");
  } catch (std::exception const& error) {
    report_error(error.what());
  }
  return EXIT_FAILURE;
}

}  // namespace nanogpt
