// SPDX-License-Identifier: Apache-2.0
// Byte-pair encoding over bytes, read from the two files of GPT-2.
#include "transformer/tokenizer/byte_pair.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <unordered_map>
#include <utility>

#include "fsdp/error.hpp"
#include "fsdp/json.hpp"
#include "transformer/data/excerpt.hpp"
#include "transformer/tokenizer/byte_alphabet.hpp"
#include "transformer/tokenizer/utf8.hpp"

namespace transformer {
namespace {

using Ids = std::unordered_map<std::string, Merges::Id>;

Ids read_ids(std::string_view text, std::string_view file) {
  auto const json = fsdp::checkpoint::parse_json<nlohmann::json>(text);
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

BytePairParts read_byte_pair_files(BytePairFiles const& files) {
  BytePairParts parts;
  auto const ids = read_ids(files.encoder_json, files.encoder_name);
  parts.tokens.resize(ids.size());
  auto const name = fsdp::formatted("'{}'", files.encoder_name);
  for (auto const& [token, id] : ids) parts.tokens[static_cast<std::size_t>(id)] = bytes_of_token(token, name);
  for (std::size_t byte = 0; auto const character : byte_alphabet()) {
    auto const found = ids.find(encode_utf8(character));
    if (found == ids.end())
      fsdp::fail<fsdp::ConfigError>("'{}': expected a token '{}' for the byte 0x{:02x}, got none", files.encoder_name,
                                    encode_utf8(character), byte);
    parts.byte_ids[byte++] = found->second;
  }
  parts.merges = MergeReader(ids, files.merges_name).read(files.vocab_bpe);
  if (auto const marker = ids.find(std::string(end_of_text_marker)); marker != ids.end()) {
    parts.end_of_text = marker->second;
    parts.special_tokens = {{marker->first, marker->second}};
  }
  return parts;
}

}  // namespace

BytePair::BytePair(BytePairFiles const& files) : BytePair(read_byte_pair_files(files)) {}

BytePair::BytePair(BytePairParts parts) : parts_(std::move(parts)) {
  if (!parts_.whole_words) return;
  for (std::size_t id = 0; id < parts_.tokens.size(); ++id)
    words_.emplace(parts_.tokens[id], static_cast<Merges::Id>(id));
  for (auto const& special : parts_.special_tokens) words_.erase(special.marker);
}

void BytePair::append(std::string_view text, std::vector<std::int64_t>& ids, WordCache& cache) const {
  std::vector<Merges::Id> symbols;
  WordScanner words(text, parts_.pattern);
  for (std::size_t begin = 0, end = 0; begin < text.size(); begin = end) {
    end = words.end_of_word(begin);
    auto const word = text.substr(begin, end - begin);
    auto* const slot = cache.slot(word);
    if (slot != nullptr && slot->holds(word)) {
      ids.insert(ids.end(), slot->ids.begin(), slot->ids.begin() + slot->count);
      continue;
    }
    symbols.clear();
    if (auto const whole = words_.find(word); whole != words_.end()) {
      symbols.push_back(whole->second);
    } else {
      for (char const byte : word) symbols.push_back(parts_.byte_ids[static_cast<unsigned char>(byte)]);
      parts_.merges.apply(symbols);
    }
    ids.insert(ids.end(), symbols.begin(), symbols.end());
    if (slot != nullptr) slot->put(word, symbols);
  }
}

std::string BytePair::decode(std::span<std::int64_t const> ids) const {
  std::string text;
  for (auto const id : ids) text += parts_.tokens[checked(id)];
  return text;
}

std::size_t BytePair::last_cut(std::string_view text) const { return last_sure_cut(text, parts_.pattern); }

}  // namespace transformer
