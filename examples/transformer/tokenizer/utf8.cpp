// SPDX-License-Identifier: Apache-2.0
// Characters and invalid bytes of UTF-8 texts.
#include "transformer/tokenizer/utf8.hpp"

#include <algorithm>
#include <array>
#include <cstdint>

#include "fsdp/error.hpp"

namespace transformer {
namespace {

/// Length of the UTF-8 sequence that `lead` begins; 0 if none does.
std::size_t sequence_length(unsigned char lead) {
  if (lead < 0x80) return 1;
  if (lead >= 0xc2 && lead <= 0xdf) return 2;
  if (lead >= 0xe0 && lead <= 0xef) return 3;
  if (lead >= 0xf0 && lead <= 0xf4) return 4;
  return 0;
}

bool continues(char byte) { return (static_cast<unsigned char>(byte) & 0xc0u) == 0x80u; }

}  // namespace

Utf8Character utf8_at(std::string_view text, std::size_t offset) {
  auto const lead = static_cast<unsigned char>(text[offset]);
  Utf8Character const stray{lead, 1, false};
  auto const length = sequence_length(lead);
  if (length == 0 || length > text.size() - offset) return stray;
  constexpr std::array<unsigned, 5> masks{0, 0x7f, 0x1f, 0x0f, 0x07};
  char32_t code = lead & masks[length];
  for (std::size_t index = 1; index < length; ++index) {
    if (!continues(text[offset + index])) return stray;
    code = (code << 6) | (static_cast<unsigned char>(text[offset + index]) & 0x3fu);
  }
  constexpr std::array<char32_t, 5> least{0, 0, 0x80, 0x800, 0x10000};
  bool const scalar = code >= least[length] && code <= 0x10ffff && !(code >= 0xd800 && code <= 0xdfff);
  return scalar ? Utf8Character{code, length, true} : stray;
}

Utf8Character utf8_before(std::string_view text, std::size_t offset) {
  // A sequence holds one lead byte, its first: whatever stands before, a valid one is read as what it is.
  for (std::size_t length = 1; length <= std::min<std::size_t>(4, offset); ++length) {
    auto const character = utf8_at(text.substr(0, offset), offset - length);
    if (character.valid && character.length == length) return character;
  }
  return {static_cast<unsigned char>(text[offset - 1]), 1, false};
}

std::size_t last_whole_character(std::string_view text) {
  for (std::size_t back = 1; back <= std::min<std::size_t>(3, text.size()); ++back) {
    auto const lead = text[text.size() - back];
    if (continues(lead)) continue;
    return sequence_length(static_cast<unsigned char>(lead)) > back ? text.size() - back : text.size();
  }
  return text.size();
}

std::size_t place_after(std::string_view text, std::size_t& characters) {
  std::size_t offset = 0;
  for (; offset < text.size() && characters > 0; --characters)
    offset += static_cast<unsigned char>(text[offset]) < 0x80 ? 1 : utf8_at(text, offset).length;
  return offset;
}

std::size_t count_characters(std::string_view text) {
  auto left = text.size();
  place_after(text, left);
  return text.size() - left;
}

std::vector<char32_t> decode_utf8(std::string_view text, std::string_view origin) {
  std::vector<char32_t> characters;
  characters.reserve(text.size());
  for (std::size_t offset = 0; offset < text.size();) {
    auto const character = utf8_at(text, offset);
    if (!character.valid)
      fsdp::fail<fsdp::ConfigError>("{}: byte {} (0x{:02x}) is not the beginning of a UTF-8 character", origin, offset,
                                    static_cast<unsigned>(character.code));
    characters.push_back(character.code);
    offset += character.length;
  }
  return characters;
}

std::string encode_utf8(char32_t character) {
  auto const code = static_cast<std::uint32_t>(character);
  auto const byte = [](std::uint32_t value) { return static_cast<char>(static_cast<unsigned char>(value)); };
  if (code < 0x80) return {byte(code)};
  if (code < 0x800) return {byte(0xc0u | (code >> 6)), byte(0x80u | (code & 0x3fu))};
  if (code < 0x10000)
    return {byte(0xe0u | (code >> 12)), byte(0x80u | ((code >> 6) & 0x3fu)), byte(0x80u | (code & 0x3fu))};
  return {byte(0xf0u | (code >> 18)), byte(0x80u | ((code >> 12) & 0x3fu)), byte(0x80u | ((code >> 6) & 0x3fu)),
          byte(0x80u | (code & 0x3fu))};
}

}  // namespace transformer
