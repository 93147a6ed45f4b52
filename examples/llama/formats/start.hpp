// SPDX-License-Identifier: Apache-2.0
// The model that a command begins with: a folder of HuggingFace's, or a run of ours.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "llama/formats/weights.hpp"
#include "llama/llama_config.hpp"
#include "transformer/run/settings.hpp"
#include "transformer/sampling/request.hpp"
#include "transformer/training/state.hpp"

namespace llama {

/// The folder in the setting `model`: a model, or adapters that name their model.
/// @throws fsdp::ConfigError saying what is missing or wrong
OpenedLlama open_model(Settings const& settings);
/// The model that config.json in the setting `model` describes. @throws fsdp::ConfigError
LlamaConfig read_config(Settings const& settings);
/// A run's model: the checkpoint that the settings name, else the weights in out_dir, else the latest checkpoint.
/// @param note  about the choice, for the user; may be empty
/// @throws fsdp::ConfigError
OpenedLlama open_run(Settings const& settings, std::string& note);
/// The weights of the frozen tensors of a run that is resumed.
/// @throws fsdp::ConfigError if they are not those that the run began with, or the settings freeze other layers
OpenedLlama open_base(Settings const& settings, RunState const& run);

/// Equal for equal weights, and most likely for no others: a checksum of the shape and of some values of each tensor.
std::string fingerprint(OpenedLlama const& model);

/// The model's tokenizer.
/// @throws fsdp::ConfigError if there is none, or it has more tokens than the model
std::shared_ptr<Tokenizer const> open_tokenizer(OpenedLlama const& model);

/// RunState::model of a model, and back.
std::string model_text(LlamaConfig const& config);
LlamaConfig model_config(RunState const& run);

/// Checks the settings of training against the model, and sets those that follow from it.
/// @throws fsdp::ConfigError naming the setting
void adopt_model(Settings& settings, LlamaConfig const& config);

/// Reads the settings of `sample` and the files that they name.
/// @param ranks  ranks in the world
/// @throws fsdp::ConfigError saying what is missing or wrong
SampleRequest<OpenedLlama> read_sample_request(Settings const& settings, std::int64_t ranks);

}  // namespace llama
