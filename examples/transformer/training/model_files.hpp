// SPDX-License-Identifier: Apache-2.0
// The files of a HuggingFace folder beside the weights, which go with the model into other folders.
#pragma once

#include <filesystem>
#include <vector>

namespace transformer {

/// The files of a folder but config.json, adapter_config.json, weights of any format, files of more than 256 MiB,
/// hidden files, and those of a run: paths relative to the folder, sorted; none if the folder's path is empty. Of its
/// folders only additional_chat_templates is looked into. Where the folder is a run's out_dir, only files_of_use belong
/// to the model.
std::vector<std::filesystem::path> files_beside_weights(std::filesystem::path const& folder);

/// The files_of_use that are in a folder; none if its path is empty.
std::vector<std::filesystem::path> files_of_use_in(std::filesystem::path const& folder);

/// Files that an export copies from the folder of the run's original model: files_beside_weights.
/// @param original         empty: none
/// @param with_tokenizer   false: the run has another tokenizer; the folder's tokenizer files are left out
std::vector<std::filesystem::path> files_for_export(std::filesystem::path const& original, bool with_tokenizer);
/// Checks that `files` may be copied into `to`.
/// @param original  the folder of the model that the run began with; may be empty
/// @throws fsdp::ConfigError if `to` is that folder, or has one of the files and `overwrite` is false
void expect_room_for_files(std::filesystem::path const& to, std::filesystem::path const& original,
                           std::vector<std::filesystem::path> const& files, bool overwrite);

/// Copies files from one folder into another, which may be the same one. Each is replaced as a whole.
/// @param files  relative to both folders
/// @throws fsdp::Error if one cannot be read or written
void copy_files(std::filesystem::path const& from, std::vector<std::filesystem::path> const& files,
                std::filesystem::path const& to);

}  // namespace transformer
