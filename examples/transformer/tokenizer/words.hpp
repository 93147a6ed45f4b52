// SPDX-License-Identifier: Apache-2.0
// GPT-2's pre-tokenizer: the words of a text, within which byte pairs are merged.
#pragma once

#include <cstddef>
#include <string_view>

namespace transformer {

/// What the pre-tokenizer tells apart: \p{L}, \p{N}, White_Space and the rest, of the Unicode version that
/// unicode_ranges.hpp names. A byte that is no UTF-8 belongs to the rest.
enum class CharClass : unsigned char { other, letter, number, space };

CharClass char_class(char32_t code);

/// Where the word ends that begins at `begin`. A word is the first of these that matches there:
///     's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
/// (OpenAI's gpt-2, src/encoder.py). Words follow each other without gaps. Takes time linear in the word's length.
/// @pre begin < text.size()
std::size_t end_of_word(std::string_view text, std::size_t begin);

/// Whether a word surely ends at `position`, whatever stands before the character in front of it and after the one
/// behind: the words of the text are then those of its two parts. See [Note: Sure cuts].
/// @pre position < text.size(), and the character there is whole
bool is_sure_cut(std::string_view text, std::size_t position);

/// The last sure cut in a text that goes on beyond its end; 0 if there is none.
std::size_t last_sure_cut(std::string_view text);

}  // namespace transformer
