// SPDX-License-Identifier: Apache-2.0
// The vocabulary of a model's data, in the folder of the model.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "transformer/data/dataset.hpp"

namespace transformer {

/// Copies meta.json and the tokenizer's files that it names into the folder, or removes the folder's meta.json if the
/// data have none. A meta.pkl becomes a meta.json. Training does so before its first checkpoint, and no earlier.
void save_vocabulary(std::filesystem::path const& folder, Meta const& meta);

/// Reads a model's meta.json.
/// @param vocab_size  the model's
/// @param model       the model's name in messages
/// @throws fsdp::ConfigError if the file is damaged, or has a larger vocabulary than the model
Meta read_vocabulary(std::filesystem::path const& path, std::int64_t vocab_size, std::filesystem::path const& model);

/// A checksum of the tokens of a vocabulary.
std::string vocabulary_checksum(Tokenizer const& tokenizer);
/// A checksum of the tokens of the tokenizer that meta.json names. Empty if it names none.
/// @throws fsdp::ConfigError if the tokenizer's files cannot be read
std::string vocabulary_checksum(Meta const& meta);

}  // namespace transformer
