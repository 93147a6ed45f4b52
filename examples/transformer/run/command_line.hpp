// SPDX-License-Identifier: Apache-2.0
// The command line of a program.
#pragma once

#include "transformer/run/settings.hpp"

namespace transformer {

/// The program's own commands. Each returns the exit code of the process.
struct OwnCommands {
  int (*run_export)(Settings const&);
  int (*run_plan)(Settings const&);
};

/// Reads the command line and runs the command that it names.
/// @return the exit code of the process
int run_command_line(int argc, char** argv, OwnCommands const& own);

}  // namespace transformer
