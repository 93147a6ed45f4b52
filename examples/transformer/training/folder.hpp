// SPDX-License-Identifier: Apache-2.0
// The folder of a run: checks before writing, the run that it holds, and its replacement.
#pragma once

#include <algorithm>
#include <array>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "transformer/run/settings.hpp"
#include "transformer/training/state.hpp"

namespace transformer {

inline constexpr std::string_view weights_name = "model.safetensors";
inline constexpr std::string_view adapters_name = "adapters.safetensors";

/// Names of files in a HuggingFace folder by which programs use a model, beside its config.json and its weights: those
/// of tokenizers, and of chats and generation.
inline constexpr std::array files_of_use = std::to_array<std::string_view>(
    {"tokenizer.json", "tokenizer.model", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json",
     "chat_template.jinja", "chat_template.json", "generation_config.json"});

/// Names of files in a model's folder, whichever program wrote it. files_of_use come last.
inline constexpr std::array files_of_a_model = [] {
  constexpr auto others = std::to_array<std::string_view>(
      {"config.json", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "model.bin",
       "vocab.json", "merges.txt", "meta.json", "adapter_model.safetensors", "adapter_config.json"});
  std::array<std::string_view, others.size() + files_of_use.size()> all;
  std::copy(files_of_use.begin(), files_of_use.end(), std::copy(others.begin(), others.end(), all.begin()));
  return all;
}();

/// Whether a file is one of several with a model's weights: model-00001-of-00003.safetensors.
bool is_part_of_weights(std::string_view name);

/// Whether this program wrote the config.json of a folder, in training or as an export in its own format. Each program
/// defines it.
/// @throws fsdp::ConfigError if the file is of no known kind
bool is_own_config(std::filesystem::path const& config);

/// Makes the folder, then writes a file there and removes it, to show that this is possible.
/// @throws fsdp::ConfigError naming the folder and why
void prepare_out_dir(std::filesystem::path const& folder);

/// A file in a folder, by which other processes see whether it is the same folder for them. Removed with this.
class FolderMark {
 public:
  /// @throws fsdp::ConfigError if no file can be written there
  explicit FolderMark(std::filesystem::path const& folder);
  FolderMark(FolderMark const&) = delete;
  FolderMark& operator=(FolderMark const&) = delete;
  ~FolderMark();

  /// The file's name, which no other process chooses, then the host's: for expect_mark().
  std::string text() const;

 private:
  std::filesystem::path file_;
};
/// @param mark  FolderMark::text() of rank 0
/// @throws fsdp::ConfigError if the mark is not in this process's `out_dir`: its machine does not share the folder
void expect_mark(std::filesystem::path const& out_dir, std::string_view mark, int rank);

/// @param setting  that names the folder, for messages
/// @throws fsdp::ConfigError if it is a file or a checkpoint, or has a run that is half moved: see [Note: Replacing a
/// run]
void expect_folder(std::filesystem::path const& folder, std::string_view setting);

/// Checks a folder for models as expect_folder does; the folder of a data set is refused too.
void expect_folder_for_models(std::filesystem::path const& folder, std::string_view setting);

/// Checks an out_dir as expect_folder_for_models does. Model files that no run wrote are refused too: a run would
/// replace them.
void expect_folder_for_runs(std::filesystem::path const& out_dir);

/// Checks `to` before an export: neither a run nor a data set is there, nor, without `overwrite`, a model.
/// @throws fsdp::ConfigError naming the folder and what is there
void expect_folder_for_export(Settings const& settings);
/// Says that an export would replace a file. @throws fsdp::ConfigError
[[noreturn]] void refuse_existing(std::filesystem::path const& to, std::string_view name);

/// The run that `out_dir`/latest names; without that file, of the only checkpoint there. @return nullopt if there is
/// none
/// @throws fsdp::ConfigError if another program wrote it, if it is damaged, or if nothing names one of several
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

}  // namespace transformer
