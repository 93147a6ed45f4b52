// SPDX-License-Identifier: Apache-2.0
// The texts of --help.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "transformer/run/choices.hpp"
#include "transformer/run/table.hpp"

namespace transformer {

/// A subcommand, as it is called and described.
struct CommandText {
  Command command{};
  std::string_view name;
  std::string_view arguments;  ///< of the usual call
  std::string_view what;       ///< it does
};

/// All of them, in the order of the work.
std::span<CommandText const> command_texts();

/// The beginning of the general help: one sentence on the program, and the commands of a first run. Each program
/// defines it.
struct ProgramText {
  std::string_view summary;
  std::string_view first_run;  ///< lines, each indented by two spaces
};
ProgramText const& program_text();

/// Printed by --help, and by the program without arguments.
std::string general_help();
/// Printed by COMMAND --help: the command's settings in groups, with their defaults.
std::string help_of(CommandText const& text);

}  // namespace transformer
