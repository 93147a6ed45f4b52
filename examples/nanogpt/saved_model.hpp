// SPDX-License-Identifier: Apache-2.0
// The folder of a trained model: model.safetensors, config.json, and copies of what the data's tokenizer is read from.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "gpt_config.hpp"
#include "transformer/data/dataset.hpp"
#include "transformer/run/choices.hpp"
#include "transformer/run/table.hpp"

namespace nanogpt {

/// What config.json says beside the shape of the model.
struct ModelState {
  std::int64_t iteration = 0;
  double train_loss = 0, val_loss = 0, best_val_loss = 0;
};

/// A saved model, without its weights.
struct SavedModel {
  GptConfig config;
  ModelState state;
  Meta meta;
  std::filesystem::path weights;
};

/// Makes the folder, and proves that files can be written there by writing one and removing it.
/// @throws fsdp::ConfigError naming the folder and why
void prepare_out_dir(std::filesystem::path const& folder);

/// Makes the folder say what the tokens are: meta.json with the files that it names, or no meta.json where the data had
/// no vocabulary. Training does so before its first checkpoint, and no earlier.
void save_vocabulary(std::filesystem::path const& folder, Meta const& meta);

/// Reads a model's meta.json. @param model  what messages call the model
/// @throws fsdp::ConfigError if it says nonsense, or has a larger vocabulary than the model
Meta read_vocabulary(std::filesystem::path const& path, GptConfig const& config, std::filesystem::path const& model);

/// Tells vocabularies apart: a checksum of what every token is. Empty where meta.json does not say.
/// @throws fsdp::ConfigError if the tokenizer's files cannot be read
std::string vocabulary_checksum(Meta const& meta);

/// Writes config.json, and the vocabulary.
/// @param settings  of the training; nullptr if they are not known
void save_model_config(std::filesystem::path const& folder, GptConfig const& config, ModelState const& state,
                       Settings const* settings, Meta const& meta);

/// Reads config.json and what it names; checks that the weights are there.
/// @throws fsdp::ConfigError saying what is missing or wrong
SavedModel open_saved_model(std::filesystem::path const& folder);

inline constexpr std::string_view weights_name = "model.safetensors";
inline constexpr std::string_view adapters_name = "adapters.safetensors";
inline constexpr std::string_view meta_name = "meta.json";

}  // namespace nanogpt
