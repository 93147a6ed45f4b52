// SPDX-License-Identifier: Apache-2.0
// A resumed run keeps its settings unless others are given.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "transformer/run/choices.hpp"
#include "transformer/run/table.hpp"
#include "transformer/training/state.hpp"

namespace transformer {

/// Takes settings from a run: those of the table with `of_run` that neither a config file nor the command line has set,
/// nor the program for these ranks.
/// @return lines to print: the given settings that differ from the run's, the taken ones that differ from the defaults,
/// and those of the run that this program does not have
/// @throws fsdp::ConfigError naming the checkpoint, the setting and its value, if that cannot be read; then no setting
/// has changed
std::vector<std::string> adopt_settings(Settings& settings, RunState const& run);

/// Before the ranks know each other: finds the run that `command` is to resume, and takes its settings.
/// @return nullopt if there is none, or if it cannot be read; prepare() then reports the error on all ranks together
std::optional<RunState> adopt_found_run(Settings& settings, Command command);

/// The fine-tuning settings in which a run and this start differ, for the end of a message; "": none, or not known.
std::string other_tuning(Settings const& settings, RunState const& run);

}  // namespace transformer
