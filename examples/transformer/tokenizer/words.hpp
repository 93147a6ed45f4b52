// SPDX-License-Identifier: Apache-2.0
// Pre-tokenizers: the words of a text, within which byte pairs are merged.
#pragma once

#include <cstddef>
#include <string_view>

namespace transformer {

/// Classes of characters for the pre-tokenizer: \p{L}, \p{N}, White_Space and the rest, of the Unicode version that
/// unicode_ranges.hpp names. A byte that is no UTF-8 belongs to the rest.
enum class CharClass : unsigned char { other, letter, number, space };

CharClass char_class(char32_t code);

/// Where the word ends that begins at `begin`. A word is the first of these that matches there:
///     's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
/// (OpenAI's gpt-2, src/encoder.py). Words follow each other without gaps. Takes time linear in the word's length.
/// @pre begin < text.size()
std::size_t end_of_word(std::string_view text, std::size_t begin);

/// Where a word of Llama 3 ends that begins at `begin` (tokenizer.py of meta-llama/llama3):
///     (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|
///     ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
std::size_t end_of_llama3_word(std::string_view text, std::size_t begin);

/// How a text is cut into words.
enum class WordPattern : unsigned char {
  gpt2,
  gpt2_digits,  ///< each \p{N} is a word of its own, and what stands between them has the words of GPT-2
  llama3
};

/// The words of a text, in turn.
class WordScanner {
 public:
  WordScanner(std::string_view text, WordPattern pattern) : text_(text), pattern_(pattern) {}
  /// Where the word ends that begins at `begin`. @pre begin < text.size(), and the word before ended there
  std::size_t end_of_word(std::size_t begin);

 private:
  std::string_view text_;
  WordPattern pattern_;
  std::size_t next_number_ = 0;  ///< gpt2_digits: the first number at the last word or behind it
};

/// Whether a word surely ends at `position`, whatever stands before the character in front of it and after the one
/// behind: the words of the text are then those of its two parts. See [Note: Sure cuts].
/// @pre position < text.size(), and the character there is whole
bool is_sure_cut(std::string_view text, std::size_t position, WordPattern pattern = WordPattern::gpt2);

/// The last sure cut in a text that goes on beyond its end; 0 if there is none.
std::size_t last_sure_cut(std::string_view text, WordPattern pattern = WordPattern::gpt2);

}  // namespace transformer
