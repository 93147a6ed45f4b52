// SPDX-License-Identifier: Apache-2.0
// What --help prints.
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

/// What `nanogpt --help` prints, and `nanogpt` alone.
std::string general_help();
/// What `nanogpt COMMAND --help` prints: its settings in groups, with their defaults.
std::string help_of(CommandText const& text);

}  // namespace transformer
