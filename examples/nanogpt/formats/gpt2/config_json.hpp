// SPDX-License-Identifier: Apache-2.0
// HuggingFace's config.json of a GPT-2.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "nanogpt/gpt_config.hpp"

namespace nanogpt {

/// Who wrote the config.json of a folder with weights.
enum class ConfigKind { nanogpt, huggingface };

/// @throws fsdp::ConfigError if it is neither's
ConfigKind kind_of_config(std::filesystem::path const& path);

/// The model that a config.json of HuggingFace's describes, with biases and without dropout: how much is dropped in
/// training is for whoever trains to say.
/// @param what  the text is, for messages
/// @throws fsdp::ConfigError naming the first value with which the model would compute what we do not
GptConfig parse_huggingface_config(std::string_view text, std::string_view what);
GptConfig read_huggingface_config(std::filesystem::path const& path);

/// A config.json that transformers loads as a GPT2LMHeadModel.
/// @param end_of_text  the tokenizer's, if it has one: then it begins and ends texts
/// @param dropout      for those who train it further
std::string huggingface_config_text(GptConfig const& config, std::optional<std::int64_t> end_of_text, double dropout,
                                    std::string_view dtype);

}  // namespace nanogpt
