// SPDX-License-Identifier: Apache-2.0
// A part of a file's text for a message.
#include "transformer/data/excerpt.hpp"

#include <fmt/format.h>

#include <cstddef>

#include "transformer/tokenizer/utf8.hpp"

namespace transformer {

std::string excerpt(std::string_view text) {
  constexpr std::size_t most = 60;
  std::string shown;
  std::size_t offset = 0;
  while (offset < text.size()) {
    auto const character = utf8_at(text, offset);
    if (offset + character.length > most) return shown + "...";
    bool const prints = character.valid && character.code >= 0x20 && (character.code < 0x7f || character.code > 0x9f);
    if (prints)
      shown += text.substr(offset, character.length);
    else
      for (auto const byte : text.substr(offset, character.length))
        shown += fmt::format("\\x{:02x}", static_cast<unsigned char>(byte));
    offset += character.length;
  }
  return shown;
}

}  // namespace transformer
