// SPDX-License-Identifier: Apache-2.0
// Characters and invalid bytes of UTF-8 texts.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace transformer {

/// A character of a text, or an invalid byte. A byte that begins no valid sequence (one that is cut off, overlong, a
/// surrogate, beyond U+10FFFF) stands for itself, alone.
struct Utf8Character {
  char32_t code = 0;  ///< the Unicode scalar value; of a byte that begins no character, the byte
  std::size_t length = 1;
  bool valid = true;
};

/// @pre offset < text.size()
Utf8Character utf8_at(std::string_view text, std::size_t offset);

/// The character that ends where `offset` is. @pre 0 < offset <= text.size(), and characters begin where the text does
Utf8Character utf8_before(std::string_view text, std::size_t offset);

/// Where the last character begins that may go on beyond the end of this part of a text; the text's size if none may.
std::size_t last_whole_character(std::string_view text);

/// Where the first so many characters end, or the text does. Takes off `characters` what it has passed.
std::size_t place_after(std::string_view text, std::size_t& characters);

/// Characters, and bytes that are none, as utf8_at counts them.
std::size_t count_characters(std::string_view text);

/// Unicode scalar values of a UTF-8 text.
/// @param origin what messages call the text
/// @throws fsdp::ConfigError with the offset of the first byte that is not UTF-8
std::vector<char32_t> decode_utf8(std::string_view text, std::string_view origin);
std::string encode_utf8(char32_t character);

}  // namespace transformer
