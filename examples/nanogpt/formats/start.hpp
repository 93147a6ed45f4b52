// SPDX-License-Identifier: Apache-2.0
// The shape of the model that a command's settings ask for.
#pragma once

#include <cstdint>
#include <string>

#include "nanogpt/formats/gpt2/open_model.hpp"
#include "nanogpt/gpt_config.hpp"
#include "transformer/run/settings.hpp"
#include "transformer/sampling/request.hpp"
#include "transformer/training/state.hpp"

namespace nanogpt {

/// The model that the settings describe. @throws fsdp::ConfigError if there is none
GptConfig model_config(Settings const& settings, std::int64_t vocab_size);
/// The model of a run.
GptConfig model_config(RunState const& run);
/// RunState::model of a model.
std::string model_text(GptConfig const& config);

/// Takes the model's shape from a run.
/// @throws fsdp::ConfigError if the command line or a config file has asked for another
void adopt_model(Settings& settings, RunState const& run);

/// Takes it from weights. A block that the settings ask for may be shorter than the weights': it then has the first of
/// their positions.
/// @throws fsdp::ConfigError if the command line or a config file has asked for another model
void adopt_model(Settings& settings, OpenedModel const& opened);

/// Reads the settings of `sample` and the files that they name.
/// @param ranks  ranks in the world
/// @throws fsdp::ConfigError saying what is missing or wrong
SampleRequest<OpenedModel> read_sample_request(Settings const& settings, std::int64_t ranks);

}  // namespace nanogpt
