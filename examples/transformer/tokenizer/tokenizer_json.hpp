// SPDX-License-Identifier: Apache-2.0
// HuggingFace's tokenizer.json of Llama models and of GPT-2's relatives.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "transformer/tokenizer/tokenizer.hpp"

namespace transformer {

/// The tokens that begin and end texts, as tokenizer_config.json names them. What is missing, the tokenizer's own file
/// says.
struct TextEnds {
  std::optional<std::string> begin, end;
  std::optional<bool> adds_begin;  ///< whether a model expects `begin` before a text
};

/// Reads tokenizer.json: byte-pair encoding of two kinds.
/// - With byte_fallback, over characters: SentencePiece, for Llama 1 and 2, CodeLlama, TinyLlama and Mistral.
/// - With the pre-tokenizer ByteLevel, over bytes: BytePair, for GPT-2, SmolLM and Llama 3.
///
/// Ids are those of HuggingFace's library without special tokens, but for the markers of special tokens in a text: the
/// library always makes ids of them, encode does with Marker::token alone.
/// @param text  the file's contents
/// @param what  the file is, for messages: "'path'"
/// @throws fsdp::ConfigError naming the first field that we do not compute with as the library does
std::unique_ptr<Tokenizer> read_tokenizer_json(std::string_view text, std::string_view what, TextEnds const& ends = {});

}  // namespace transformer
