// SPDX-License-Identifier: Apache-2.0
// Pre-tokenizers: the words of a text, within which byte pairs are merged.
#include "transformer/tokenizer/words.hpp"

#include <algorithm>
#include <array>
#include <iterator>
#include <span>

#include "transformer/tokenizer/unicode_ranges.hpp"
#include "transformer/tokenizer/utf8.hpp"

namespace transformer {
namespace {

constexpr bool contains(std::span<CodeRange const> ranges, char32_t code) {
  auto const after =
      std::upper_bound(ranges.begin(), ranges.end(), code, [](char32_t c, CodeRange range) { return c < range.first; });
  return after != ranges.begin() && code <= std::prev(after)->last;
}

constexpr CharClass look_up(char32_t code) {
  if (contains(letter_ranges, code)) return CharClass::letter;
  if (contains(number_ranges, code)) return CharClass::number;
  if (contains(space_ranges, code)) return CharClass::space;
  return CharClass::other;
}

constexpr std::array<CharClass, 128> ascii = [] {
  std::array<CharClass, 128> classes{};
  for (char32_t code = 0; code < classes.size(); ++code) classes[code] = look_up(code);
  return classes;
}();

struct Classed {
  CharClass kind;
  std::size_t length;
};

CharClass class_of(Utf8Character const& character) {
  return character.valid ? char_class(character.code) : CharClass::other;
}

Classed classed_at(std::string_view text, std::size_t offset) {
  auto const byte = static_cast<unsigned char>(text[offset]);
  if (byte < ascii.size()) return {ascii[byte], 1};
  auto const character = utf8_at(text, offset);
  return {class_of(character), character.length};
}

std::size_t end_of_run(std::string_view text, std::size_t begin, CharClass kind) {
  while (begin < text.size()) {
    auto const next = classed_at(text, begin);
    if (next.kind != kind) break;
    begin += next.length;
  }
  return begin;
}

/// Length of the contraction that the text begins with; 0 if with none.
std::size_t contraction(std::string_view text) {
  if (text.size() < 2 || text[0] != '\'') return 0;
  if (std::string_view("stmd").find(text[1]) != std::string_view::npos) return 2;
  auto const two = text.substr(1, 2);
  return two == "re" || two == "ve" || two == "ll" ? 3 : 0;
}

/// White space gives its last character to the word behind, if there is one and white space before it.
std::size_t end_of_space(std::string_view text, std::size_t begin) {
  auto last = begin, end = begin;
  while (end < text.size()) {
    auto const next = classed_at(text, end);
    if (next.kind != CharClass::space) return last == begin ? end : last;
    last = end;
    end += next.length;
  }
  return end;
}

bool is_line_break(char byte) { return byte == '\r' || byte == '\n'; }

/// contraction, in small letters or large ones. U+017F, the long s, is a small form of S.
std::size_t folded_contraction(std::string_view text) {
  if (text.size() < 2 || text[0] != '\'') return 0;
  if (text.substr(1).starts_with("\xc5\xbf")) return 3;
  std::array<char, 3> small{'\'', 0, 0};
  for (std::size_t i = 1; i < std::min<std::size_t>(3, text.size()); ++i)
    small[i] = static_cast<char>(text[i] >= 'A' && text[i] <= 'Z' ? text[i] - 'A' + 'a' : text[i]);
  return contraction({small.data(), std::min<std::size_t>(3, text.size())});
}

/// White space up to its last line break, or else as end_of_space.
std::size_t end_of_lines(std::string_view text, std::size_t begin) {
  std::size_t behind_break = begin;
  for (auto end = begin; end < text.size();) {
    auto const next = classed_at(text, end);
    if (next.kind != CharClass::space) break;
    if (is_line_break(text[end])) behind_break = end + 1;
    end += next.length;
  }
  return behind_break > begin ? behind_break : end_of_space(text, begin);
}

}  // namespace

CharClass char_class(char32_t code) { return code < ascii.size() ? ascii[code] : look_up(code); }

std::size_t end_of_word(std::string_view text, std::size_t begin) {
  if (auto const length = contraction(text.substr(begin)); length != 0) return begin + length;
  auto const after_blank = begin + (text[begin] == ' ' ? 1 : 0);
  if (after_blank < text.size()) {
    auto const kind = classed_at(text, after_blank).kind;
    if (kind != CharClass::space) return end_of_run(text, after_blank, kind);
  }
  return end_of_space(text, begin);
}

std::size_t end_of_llama3_word(std::string_view text, std::size_t begin) {
  if (auto const length = folded_contraction(text.substr(begin)); length != 0) return begin + length;
  auto const first = classed_at(text, begin);
  if (first.kind == CharClass::letter) return end_of_run(text, begin, CharClass::letter);
  auto const behind = begin + first.length;
  if (first.kind == CharClass::number) {
    auto end = behind;
    for (int numbers = 1; numbers < 3 && end < text.size(); ++numbers) {
      auto const next = classed_at(text, end);
      if (next.kind != CharClass::number) break;
      end += next.length;
    }
    return end;
  }
  if (behind < text.size() && !is_line_break(text[begin]) && classed_at(text, behind).kind == CharClass::letter)
    return end_of_run(text, behind, CharClass::letter);
  auto const after_blank = begin + (text[begin] == ' ' ? 1 : 0);
  if (after_blank == text.size() || classed_at(text, after_blank).kind != CharClass::other)
    return end_of_lines(text, begin);
  auto end = end_of_run(text, after_blank, CharClass::other);
  while (end < text.size() && is_line_break(text[end])) ++end;
  return end;
}

std::size_t WordScanner::end_of_word(std::size_t begin) {
  if (pattern_ == WordPattern::gpt2) return transformer::end_of_word(text_, begin);
  if (pattern_ == WordPattern::llama3) return end_of_llama3_word(text_, begin);
  if (next_number_ < begin || begin == 0) {
    next_number_ = begin;
    while (next_number_ < text_.size()) {
      auto const next = classed_at(text_, next_number_);
      if (next.kind == CharClass::number) break;
      next_number_ += next.length;
    }
  }
  if (next_number_ == begin) return begin + classed_at(text_, begin).length;
  return transformer::end_of_word(text_.substr(0, next_number_), begin);
}

// [Note: Sure cuts]
// The scanner never looks back, so a cut is sure where a word ends in any case, and where cutting the text does not
// change how its words before end. Only white space looks beyond its end, at one character: no cut follows white space.
// After anything else a word ends where the class changes, for every word is one class after its optional blank, but
// for contractions: these begin with an apostrophe, which letters may therefore follow within a word, and end with
// letters.
// Of the other patterns: with gpt2_digits a word ends at each end of a number. A word of Llama 3 that has a letter or a
// number ends with its run of them, of numbers after three; one of other characters may end with line breaks, and a
// character that is neither may begin a word of letters.
bool is_sure_cut(std::string_view text, std::size_t position, WordPattern pattern) {
  if (position == 0) return false;
  auto const before = class_of(utf8_before(text, position));
  auto const behind = classed_at(text, position).kind;
  if (pattern == WordPattern::gpt2_digits && (before == CharClass::number || behind == CharClass::number)) return true;
  if (pattern == WordPattern::llama3) {
    if (before == CharClass::space || before == behind) return false;
    if (before != CharClass::other) return true;
    return behind == CharClass::number || (behind == CharClass::space && !is_line_break(text[position]));
  }
  if (before == CharClass::space || before == behind) return false;
  return text[position - 1] != '\'' || behind != CharClass::letter;
}

std::size_t last_sure_cut(std::string_view text, WordPattern pattern) {
  // A character that the end may have cut in two is none to judge by.
  for (auto position = last_whole_character(text); position-- > 1;)
    if (is_sure_cut(text, position, pattern)) return position;
  return 0;
}

}  // namespace transformer
