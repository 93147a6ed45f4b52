// SPDX-License-Identifier: Apache-2.0
// The tokenizer in the folder of a model.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "transformer/tokenizer/tokenizer.hpp"

namespace transformer {

/// Whether open_tokenizer_folder finds a file there.
bool has_tokenizer(std::filesystem::path const& folder);

/// The names of the files that open_tokenizer_folder reads.
std::span<std::string_view const> names_of_tokenizer_files();
/// The files of these names in a folder that open_tokenizer_folder reads.
std::vector<std::filesystem::path> tokenizer_files(std::filesystem::path const& folder);

/// Opens tokenizer.json, or tokenizer.model if there is none: the first may have tokens that were added later.
/// The files beside it add tokens, name the tokens that begin and end texts, and say whether these stand around each
/// text: see TokenizerConfig.
/// @param vocab_size  the model's; the tokenizer may have fewer tokens
/// @throws fsdp::ConfigError naming the file if there is no tokenizer, or none that can be used with the model
std::unique_ptr<Tokenizer> open_tokenizer_folder(std::filesystem::path const& folder, std::int64_t vocab_size);

}  // namespace transformer
