// SPDX-License-Identifier: Apache-2.0
// The folder of a trained model: model.safetensors, config.json, and copies of the data's tokenizer files.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "nanogpt/gpt_config.hpp"
#include "transformer/data/dataset.hpp"
#include "transformer/run/choices.hpp"
#include "transformer/run/table.hpp"
#include "transformer/training/folder.hpp"
#include "transformer/training/vocabulary.hpp"

namespace nanogpt {

/// Training state in config.json.
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

/// Writes config.json, and the vocabulary.
/// @param settings  of the training; nullptr if they are not known
void save_model_config(std::filesystem::path const& folder, GptConfig const& config, ModelState const& state,
                       Settings const* settings, Meta const& meta);

/// The shape of a model whose config.json nanogpt has written. @throws fsdp::ConfigError saying what is missing or
/// wrong
GptConfig read_saved_config(std::filesystem::path const& config_json);

/// Reads config.json and what it names; checks that the weights are there.
/// @throws fsdp::ConfigError saying what is missing or wrong
SavedModel open_saved_model(std::filesystem::path const& folder);

}  // namespace nanogpt
