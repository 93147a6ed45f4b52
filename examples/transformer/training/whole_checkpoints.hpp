// SPDX-License-Identifier: Apache-2.0
// Finds complete checkpoints of a run if one is damaged or missing.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "fsdp/error.hpp"
#include "transformer/run/settings.hpp"
#include "transformer/training/state.hpp"

namespace transformer {

/// Reads a whole checkpoint and compares all checksums. @return what is wrong; empty if it is whole
std::string fault_of(std::filesystem::path const& checkpoint);

/// The newest checkpoint of `out_dir` that is whole, without the one that is damaged. Reads checkpoints until one is.
/// @param why  what is wrong with the damaged one, for the message
/// @throws fsdp::ConfigError naming what is wrong with each if there is none
std::string newest_whole(std::filesystem::path const& out_dir, std::string_view damaged, std::string const& why);

/// For the end of a message: which checkpoints of `out_dir` are whole, without the one that is damaged, and the setting
/// that takes one. Reads all of them.
/// @param damaged  its name; empty: any of them may be
/// @param also     another way out, for the message; may be empty
std::string other_checkpoints(std::filesystem::path const& out_dir, std::string_view damaged, std::string_view also);

/// @param why  a checkpoint cannot be read, for `sample` and `export`
/// @throws fsdp::ConfigError with the checkpoints beside it that are whole
[[noreturn]] void fail_with_others(std::filesystem::path const& checkpoint, std::string_view why);

/// Reads something of a checkpoint for `sample` and `export`. @throws fsdp::ConfigError as fail_with_others
template <class Read>
auto with_others(std::filesystem::path const& checkpoint, Read const& read) {
  try {
    return read();
  } catch (fsdp::ConfigError const& error) {
    fail_with_others(checkpoint, error.what());
  }
}

/// The folder that the setting 'checkpoint' names: best, latest, a folder of out_dir, or any folder.
/// @throws fsdp::ConfigError if it is none of these
std::filesystem::path named_checkpoint(std::filesystem::path const& out_dir, std::string const& name);

/// The run to continue, and what the user should know of the choice; "": nothing.
struct ChosenRun {
  std::optional<RunState> run;  ///< nullopt: there is no checkpoint in out_dir
  std::string note;
};
/// The run that `init_from` (resume or auto) and `checkpoint` name. Its description has been read, not its data. Where
/// that fails, auto takes the newest that can be read.
/// @param explains  false: the message does not name the checkpoints that are whole, for which all of them are read
/// @throws fsdp::ConfigError if a checkpoint is there but cannot be taken
ChosenRun choose_run(Settings const& settings, bool explains);

}  // namespace transformer
