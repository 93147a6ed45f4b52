// SPDX-License-Identifier: Apache-2.0
// HuggingFace's tokenizer.json of Llama models and of GPT-2's relatives.
#pragma once

#include <memory>
#include <string_view>

#include "transformer/tokenizer/tokenizer.hpp"
#include "transformer/tokenizer/tokenizer_config.hpp"

namespace transformer {

/// Reads tokenizer.json: byte-pair encoding of two kinds.
/// - With byte_fallback, over characters: SentencePiece, for Llama 1 and 2, CodeLlama, TinyLlama and Mistral.
/// - With the pre-tokenizer ByteLevel, over bytes: BytePair, for GPT-2, SmolLM and Llama 3.
///
/// Ids are those of HuggingFace's library without special tokens, but for the markers of added tokens in a text: the
/// library always makes ids of them, encode does with Marker::token alone. Its sections on truncation and padding are
/// not read: transformers truncates and pads only where a caller asks for it.
/// @param text    the file's contents
/// @param what    the file's name for messages: "'path'"
/// @param config  what the files beside it say
/// @throws fsdp::ConfigError naming the first field that we do not compute with as the library does
std::unique_ptr<Tokenizer> read_tokenizer_json(std::string_view text, std::string_view what,
                                               TokenizerConfig const& config = {});

}  // namespace transformer
