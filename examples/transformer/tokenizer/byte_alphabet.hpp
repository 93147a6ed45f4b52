// SPDX-License-Identifier: Apache-2.0
// The characters that stand for bytes in the files of a byte-level tokenizer (OpenAI's gpt-2, bytes_to_unicode).
#pragma once

#include <array>
#include <string>
#include <string_view>

namespace transformer {

/// The character that stands for each byte: itself where it prints and is no blank, else, in order, those from U+0100
/// on.
std::array<char32_t, 256> byte_alphabet();

/// The bytes that a token stands for.
/// @param what  the file is, for messages: "'path'"
/// @throws fsdp::ConfigError naming a character that stands for no byte
std::string bytes_of_token(std::string const& token, std::string_view what);

}  // namespace transformer
