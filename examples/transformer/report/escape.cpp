// SPDX-License-Identifier: Apache-2.0
#include "transformer/report/escape.hpp"

#include <fmt/format.h>

#include <cstddef>

#include "transformer/tokenizer/utf8.hpp"

namespace transformer::report {
namespace {

constexpr char32_t replacement = 0xfffd;

/// Whether XML 1.0 has the character, section 2.2; and it is none of the controls that only terminals know.
bool is_of_xml(char32_t code) {
  return code == '\t' || code == '\n' || (code >= 0x20 && code < 0x7f) || (code >= 0xa0 && code < 0xfffe) ||
         code > 0xffff;
}

/// Calls `add` with each character of the text that a page may have.
template <class Add>
void each_character(std::string_view text, Add&& add) {
  for (std::size_t at = 0; at < text.size();) {
    auto const character = utf8_at(text, at);
    at += character.length;
    add(character.valid && is_of_xml(character.code) ? character.code : replacement);
  }
}

}  // namespace

std::string escaped(std::string_view text) {
  std::string safe;
  each_character(text, [&](char32_t code) {
    switch (code) {
      case '&': safe += "&amp;"; return;
      case '<': safe += "&lt;"; return;
      case '>': safe += "&gt;"; return;
      case '"': safe += "&quot;"; return;
      case '\'': safe += "&#39;"; return;
      default: safe += encode_utf8(code);
    }
  });
  return safe;
}

std::string script_text(std::string_view text) {
  std::string safe = "\"";
  each_character(text, [&](char32_t code) {
    bool const plain = code >= 0x20 && code < 0x7f && code != '"' && code != '\\' && code != '<' && code != '>' &&
                       code != '&' && code != '\'';
    if (plain) {
      safe += static_cast<char>(code);
    } else if (code > 0xffff) {
      auto const rest = static_cast<unsigned>(code - 0x10000);
      safe += fmt::format("\\u{:04x}\\u{:04x}", 0xd800 + (rest >> 10), 0xdc00 + (rest & 0x3ff));
    } else {
      safe += fmt::format("\\u{:04x}", static_cast<unsigned>(code));
    }
  });
  return safe + '"';
}

std::string printable(std::string_view text) {
  std::string safe;
  for (std::size_t at = 0; at < text.size();) {
    auto const character = utf8_at(text, at);
    auto const bytes = text.substr(at, character.length);
    at += character.length;
    auto const code = character.code;
    bool const controls = (code < 0x20 && code != '\n' && code != '\t') || (code >= 0x7f && code < 0xa0);
    if (character.valid && !controls)
      safe += bytes;
    else
      for (char const byte : bytes) safe += fmt::format("\\x{:02x}", static_cast<unsigned char>(byte));
  }
  return safe;
}

std::string shortened(std::string_view text, std::size_t most) {
  std::size_t at = 0;
  for (std::size_t count = 0; at < text.size() && count < most; ++count) at += utf8_at(text, at).length;
  if (at == text.size()) return std::string(text);
  return std::string(text.substr(0, at)) + "...";
}

}  // namespace transformer::report
