// SPDX-License-Identifier: Apache-2.0
// The folder of a run: whether a run may write there, which run it holds, and how a new one replaces it.
#pragma once

#include <array>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "run_state.hpp"

namespace nanogpt {

/// What the folder of a model may have: one that nanogpt has trained or exported, or another program.
inline constexpr std::array<std::string_view, 9> files_of_a_model{
    "config.json",       "model.safetensors", "model.safetensors.index.json",
    "pytorch_model.bin", "model.bin",         "tokenizer.json",
    "vocab.json",        "merges.txt",        "meta.json"};

/// @param setting  that names the folder, for messages
/// @throws fsdp::ConfigError if it is a file or a checkpoint, or has a run that is half moved: see [Note: Replacing a
/// run]
void expect_folder(std::filesystem::path const& folder, std::string_view setting);

/// The same of a folder that models are to be written to; the folder of a data set is refused too.
void expect_folder_for_models(std::filesystem::path const& folder, std::string_view setting);

/// The same of an out_dir; files that no run of nanogpt has written, and that a run would replace, are refused too.
void expect_folder_for_runs(std::filesystem::path const& out_dir);

/// The run that `out_dir`/latest names; without that file, of the only checkpoint there. @return nullopt if there is
/// none
/// @throws fsdp::ConfigError if it is none of nanogpt's, or damaged, or one of several that nothing names
std::optional<RunState> find_run(std::filesystem::path const& out_dir);

/// The run that a new one in `out_dir` would destroy, in words for messages. @return empty if there is none
std::string run_in(std::filesystem::path const& out_dir);

/// [Note: Replacing a run]
/// A run that starts with --overwrite leaves the old one as it is until its own first save. Then it moves checkpoints,
/// weights and vocabulary of the old run to `out_dir`/replaced-run, and removes that folder when its own first
/// checkpoint is whole. A start that is killed between the two leaves the old run there; the next start with
/// --overwrite goes on with the replacement, and any other one is refused. While the old run is moved, its files are in
/// a hidden folder: nothing reads or writes an out_dir with such a folder.

/// @throws fsdp::ConfigError if the folder of a replaced run is there and checkpoints of another one beside it, or if
/// the folder of that name is somebody else's
void expect_replaceable(std::filesystem::path const& out_dir);
/// Moves the run to the folder replaced-run, unless that is there already. @throws fsdp::ResourceError
void set_run_aside(std::filesystem::path const& out_dir);
/// @throws fsdp::ResourceError
void remove_replaced_run(std::filesystem::path const& out_dir);
/// The folder of a run that was set aside. @return empty if there is none
std::filesystem::path replaced_run_in(std::filesystem::path const& out_dir);
/// For the end of a message that finds no checkpoint in `out_dir`. @return empty if no run was set aside there
std::string note_on_replaced_run(std::filesystem::path const& out_dir);

}  // namespace nanogpt
