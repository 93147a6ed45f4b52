// SPDX-License-Identifier: Apache-2.0
// HuggingFace's config.json of a Llama.
#pragma once

#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>

#include "llama/llama_config.hpp"

namespace llama {

/// The model that a config.json describes, its rotary embeddings by rope_theta and rope_scaling, or by rope_parameters
/// as transformers 5 writes them. A mistral computes what a Llama does in sequences that are no longer than its
/// sliding_window.
/// @param what  the text is, for messages: "'path'"
/// @throws fsdp::ConfigError naming the first key with which transformers computes what we do not, or whose effect is
/// not known
LlamaConfig parse_huggingface_config(std::string_view text, std::string_view what);
LlamaConfig read_huggingface_config(std::filesystem::path const& path);

/// A config.json, changed where weights are written anew: their type, and the class that their names are of. All other
/// keys stay, such as the ids of tokens.
/// @param folders  the first that has the config.json of a model of this shape is taken; may be empty paths
/// @param dtype    of the weights: "float32", "bfloat16"
/// @return empty if none has one
std::string changed_config_text(std::initializer_list<std::filesystem::path> folders, LlamaConfig const& config,
                                std::string_view dtype);

/// A config.json that transformers loads as a LlamaForCausalLM. Its versions 4 and 5 read the same rope_theta and
/// rope_scaling.
/// @param begin_of_text, end_of_text  the tokenizer's, if it has them
/// @param dtype  of the weights beside it: "float32", "bfloat16"
std::string huggingface_config_text(LlamaConfig const& config, std::optional<std::int64_t> begin_of_text,
                                    std::optional<std::int64_t> end_of_text, std::string_view dtype);

}  // namespace llama
