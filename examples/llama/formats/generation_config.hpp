// SPDX-License-Identifier: Apache-2.0
// Reads how a model continues texts from its folder's generation_config.json, or else from config.json.
#pragma once

#include <cstdint>
#include <vector>

#include "llama/formats/weights.hpp"

namespace llama {

/// The ids at which transformers ends a text: eos_token_id of generation_config.json, or without that file of
/// config.json, in the folder of the tokenizer or else in that of the original model.
/// @return in the order of the file; empty if there are none
/// @throws fsdp::ConfigError naming the key if an id lies outside the vocabulary, or if generation_config.json changes
/// the choice of tokens by something other than the settings that `sample` has itself
std::vector<std::int64_t> ids_that_end_texts(OpenedLlama const& model);

}  // namespace llama
