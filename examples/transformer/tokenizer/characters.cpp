// SPDX-License-Identifier: Apache-2.0
// A tokenizer whose tokens are the characters of a text.
#include "transformer/tokenizer/characters.hpp"

#include <utility>

#include "fsdp/error.hpp"
#include "transformer/tokenizer/utf8.hpp"

namespace transformer {
namespace {

/// A character for messages, which a line break would tear.
std::string named(char32_t character) {
  auto const code = fsdp::formatted("U+{:04X}", static_cast<std::uint32_t>(character));
  return character < 0x20 ? code : fsdp::formatted("'{}' ({})", encode_utf8(character), code);
}

}  // namespace

Characters::Characters(std::vector<std::string> symbols) : symbols_(std::move(symbols)) {
  for (auto const& symbol : symbols_)
    if (!ids_.emplace(symbol, static_cast<std::int64_t>(ids_.size())).second)
      fsdp::fail<fsdp::ConfigError>("the symbol '{}' occurs twice in the vocabulary", symbol);
}

std::optional<std::int64_t> Characters::end_of_text() const {
  auto const found = ids_.find(std::string(end_of_text_marker));
  return found == ids_.end() ? std::nullopt : std::optional(found->second);
}

void Characters::append(std::string_view text, std::vector<std::int64_t>& ids, WordCache&) const {
  for (char32_t const character : decode_utf8(text, "text")) {
    auto const found = ids_.find(encode_utf8(character));
    if (found == ids_.end())
      fsdp::fail<fsdp::ConfigError>("text: character {} is not one of the {} characters of the vocabulary",
                                    named(character), size());
    ids.push_back(found->second);
  }
}

std::string Characters::decode(std::span<std::int64_t const> ids) const {
  std::string text;
  for (auto const id : ids) text += symbols_[checked(id)];
  return text;
}

std::size_t Characters::last_cut(std::string_view text) const { return last_whole_character(text); }

}  // namespace transformer
