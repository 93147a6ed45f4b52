// SPDX-License-Identifier: Apache-2.0
// Exit codes and error messages of a program.
#pragma once

#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>
#include <string>
#include <utility>

#include "fsdp/error.hpp"
#include "transformer/launch/program.hpp"
#include "transformer/report/escape.hpp"

namespace transformer {

/// A process's command line, as MPI wants it too.
struct CommandLine {
  int argc;
  char** argv;
};

/// Prints "nanogpt: error: ...", with the program's name, to stderr in one piece.
inline void report_error(std::string const& text) {
  auto const line = fmt::format("{}: error: {}\n", program_name, report::printable(text));
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

}  // namespace transformer
