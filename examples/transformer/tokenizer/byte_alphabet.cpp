// SPDX-License-Identifier: Apache-2.0
// The characters that stand for bytes in the files of a byte-level tokenizer.
#include "transformer/tokenizer/byte_alphabet.hpp"

#include <cstdint>
#include <unordered_map>

#include "fsdp/error.hpp"
#include "transformer/data/excerpt.hpp"
#include "transformer/tokenizer/utf8.hpp"

namespace transformer {

std::array<char32_t, 256> byte_alphabet() {
  std::array<char32_t, 256> alphabet{};
  char32_t next = 0x100;
  for (char32_t byte = 0; byte < 256; ++byte) {
    bool const prints = (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
    alphabet[byte] = prints ? byte : next++;
  }
  return alphabet;
}

std::string bytes_of_token(std::string const& token, std::string_view what) {
  static auto const bytes = [] {
    std::unordered_map<char32_t, char> map;
    for (std::size_t byte = 0; auto const character : byte_alphabet())
      map.emplace(character, static_cast<char>(static_cast<unsigned char>(byte++)));
    return map;
  }();
  std::string text;
  for (auto const character : decode_utf8(token, what)) {
    auto const found = bytes.find(character);
    if (found == bytes.end())
      fsdp::fail<fsdp::ConfigError>("{}: token '{}': U+{:04X} does not represent a byte", what, excerpt(token),
                                    static_cast<std::uint32_t>(character));
    text += found->second;
  }
  return text;
}

}  // namespace transformer
