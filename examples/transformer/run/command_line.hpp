// SPDX-License-Identifier: Apache-2.0
// The command line of a program.
#pragma once

#include "transformer/run/settings.hpp"

namespace transformer {

/// Reads the command line and runs the command that it names.
/// @param run_export  the program's `export`
/// @return the exit code of the process
int run_command_line(int argc, char** argv, int (*run_export)(Settings const&));

}  // namespace transformer
