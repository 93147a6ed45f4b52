// SPDX-License-Identifier: Apache-2.0
// The model that `sample` reads: where its weights are, its shape and its tokens.
#pragma once

#include <filesystem>
#include <string>

#include "data.hpp"
#include "gpt_config.hpp"
#include "settings.hpp"

namespace nanogpt {

/// A model to be sampled from, without its weights.
struct SampledModel {
  GptConfig config;
  Meta meta;
  std::filesystem::path weights;     ///< whole, a safetensors file; empty: they are in the checkpoint
  std::filesystem::path checkpoint;  ///< sharded: the folder of one; empty: they are in the file
  std::string note;                  ///< what the user should know of this choice; empty: nothing
};

/// Finds the model that the settings name: a checkpoint if they name one, else out_dir's model.safetensors, else the
/// latest checkpoint there.
/// @throws fsdp::ConfigError saying what is missing or wrong
SampledModel open_sampled_model(Settings const& settings);

}  // namespace nanogpt
