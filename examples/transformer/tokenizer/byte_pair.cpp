// SPDX-License-Identifier: Apache-2.0
// GPT-2's byte-pair encoding, read from the files that OpenAI published.
#include "transformer/tokenizer/byte_pair.hpp"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "fsdp/error.hpp"
#include "transformer/data/excerpt.hpp"
#include "transformer/tokenizer/utf8.hpp"
#include "transformer/tokenizer/words.hpp"

namespace transformer {
namespace {

using Ids = std::unordered_map<std::string, Merges::Id>;

/// The character that stands for each byte in both files: itself where it prints and is no blank, else, in order, those
/// from U+0100 on.
std::array<char32_t, 256> byte_alphabet() {
  std::array<char32_t, 256> alphabet{};
  char32_t next = 0x100;
  for (char32_t byte = 0; byte < 256; ++byte) {
    bool const prints = (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
    alphabet[byte] = prints ? byte : next++;
  }
  return alphabet;
}

/// The bytes that a token of encoder.json stands for.
std::string bytes_of(std::string const& token, std::string_view file) {
  static auto const bytes = [] {
    std::unordered_map<char32_t, char> map;
    for (std::size_t byte = 0; auto const character : byte_alphabet())
      map.emplace(character, static_cast<char>(static_cast<unsigned char>(byte++)));
    return map;
  }();
  std::string text;
  for (auto const character : decode_utf8(token, file)) {
    auto const found = bytes.find(character);
    if (found == bytes.end())
      fsdp::fail<fsdp::ConfigError>("'{}': token '{}': U+{:04X} does not represent a byte", file, excerpt(token),
                                    static_cast<std::uint32_t>(character));
    text += found->second;
  }
  return text;
}

Ids read_ids(std::string_view text, std::string_view file) {
  auto const json = nlohmann::json::parse(text, nullptr, false);
  if (!json.is_object() || json.empty())
    fsdp::fail<fsdp::ConfigError>("'{}': expected a JSON object of tokens and their ids", file);
  Ids ids;
  std::vector<bool> taken(json.size());
  for (auto const& [token, value] : json.items()) {
    if (token.empty()) fsdp::fail<fsdp::ConfigError>("'{}': a token is empty", file);
    auto const id = value.is_number_integer() ? value.get<std::int64_t>() : -1;
    if (id < 0 || id >= static_cast<std::int64_t>(json.size()) || taken[static_cast<std::size_t>(id)])
      fsdp::fail<fsdp::ConfigError>("'{}': token '{}': expected a unique id below {}, got {}", file, excerpt(token),
                                    json.size(), excerpt(value.dump()));
    taken[static_cast<std::size_t>(id)] = true;
    ids.emplace(token, static_cast<Merges::Id>(id));
  }
  return ids;
}

/// Reads vocab.bpe: a line that names the version, which may be missing, then two symbols a line.
class MergeReader {
 public:
  MergeReader(Ids const& ids, std::string_view file) : ids_(ids), file_(file), made_(ids.size()) {
    for (auto const character : byte_alphabet()) made_[index(ids_.at(encode_utf8(character)))] = true;
  }

  Merges read(std::string_view text) {
    Merges merges(static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n')) + 1);
    for (line_ = 1; !text.empty(); ++line_) {
      auto const end = std::min(text.find('\n'), text.size());
      auto line = text.substr(0, end);
      text.remove_prefix(std::min(end + 1, text.size()));
      if (line.ends_with('\r')) line.remove_suffix(1);
      if (line.empty() || (line_ == 1 && line.starts_with("#version"))) continue;
      add(merges, line);
    }
    return merges;
  }

 private:
  static std::size_t index(Merges::Id id) { return static_cast<std::size_t>(id); }

  void add(Merges& merges, std::string_view line) {
    auto const blank = line.find(' ');
    if (blank == std::string_view::npos || line.find(' ', blank + 1) != std::string_view::npos || blank == 0 ||
        blank + 1 == line.size())
      wrong("expected two symbols with a blank between them, got", line);
    auto const left = line.substr(0, blank), right = line.substr(blank + 1);
    auto const merged = id_of(std::string(left) + std::string(right));
    if (made_[index(merged)]) wrong("a line above has the same result:", line);
    merges.add(made(left), made(right), merged);
    made_[index(merged)] = true;
  }
  Merges::Id id_of(std::string const& symbol) const {
    auto const found = ids_.find(symbol);
    if (found == ids_.end()) wrong("encoder.json has no id for", symbol);
    return found->second;
  }
  Merges::Id made(std::string_view symbol) const {
    auto const id = id_of(std::string(symbol));
    if (!made_[index(id)]) wrong("the symbol is neither a byte nor the result of a line above:", symbol);
    return id;
  }
  [[noreturn]] void wrong(std::string_view what, std::string_view text) const {
    fsdp::fail<fsdp::ConfigError>("'{}', line {}: {} '{}'", file_, line_, what, excerpt(text));
  }

  Ids const& ids_;
  std::string_view file_;
  std::vector<bool> made_;  ///< by id: a byte, or made by a line that was read
  std::int64_t line_ = 0;
};

}  // namespace

BytePair::BytePair(BytePairFiles const& files) : merges_(0) {
  auto const ids = read_ids(files.encoder_json, files.encoder_name);
  tokens_.resize(ids.size());
  for (auto const& [token, id] : ids) tokens_[static_cast<std::size_t>(id)] = bytes_of(token, files.encoder_name);
  for (std::size_t byte = 0; auto const character : byte_alphabet()) {
    auto const found = ids.find(encode_utf8(character));
    if (found == ids.end())
      fsdp::fail<fsdp::ConfigError>("'{}': expected a token '{}' for the byte 0x{:02x}, got none", files.encoder_name,
                                    encode_utf8(character), byte);
    byte_ids_.push_back(found->second);
    ++byte;
  }
  merges_ = MergeReader(ids, files.merges_name).read(files.vocab_bpe);
  if (auto const marker = ids.find(std::string(end_of_text_marker)); marker != ids.end()) end_of_text_ = marker->second;
}

void BytePair::append(std::string_view text, std::vector<std::int64_t>& ids, WordCache& cache) const {
  std::vector<Merges::Id> symbols;
  for (std::size_t begin = 0, end = 0; begin < text.size(); begin = end) {
    end = end_of_word(text, begin);
    auto const word = text.substr(begin, end - begin);
    auto* const slot = cache.slot(word);
    if (slot != nullptr && slot->holds(word)) {
      ids.insert(ids.end(), slot->ids.begin(), slot->ids.begin() + slot->count);
      continue;
    }
    symbols.clear();
    for (char const byte : word) symbols.push_back(byte_ids_[static_cast<unsigned char>(byte)]);
    merges_.apply(symbols);
    ids.insert(ids.end(), symbols.begin(), symbols.end());
    if (slot != nullptr) slot->put(word, symbols);
  }
}

std::string BytePair::decode(std::span<std::int64_t const> ids) const {
  std::string text;
  for (auto const id : ids) text += tokens_[checked(id)];
  return text;
}

std::size_t BytePair::last_cut(std::string_view text) const { return last_sure_cut(text); }

}  // namespace transformer
