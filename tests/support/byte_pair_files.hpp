// SPDX-License-Identifier: Apache-2.0
// Small files like GPT-2's encoder.json and vocab.bpe, and another way to encode with them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fsdp::testing {

/// Symbols and merges as bytes; files() writes them in GPT-2's form.
struct BytePairs {
  std::vector<std::pair<std::string, std::string>> merges;
  bool marker = true;  ///< whether <|endoftext|> has the last id

  /// Merges of random symbols over few letters.
  static BytePairs random(std::uint32_t seed, std::size_t count, std::string_view letters) {
    std::mt19937 draw(seed);
    std::vector<std::string> symbols;
    for (char const letter : letters) symbols.emplace_back(1, letter);
    BytePairs pairs;
    while (pairs.merges.size() < count) {
      auto const &left = symbols[draw() % symbols.size()], &right = symbols[draw() % symbols.size()];
      if (std::find(symbols.begin(), symbols.end(), left + right) != symbols.end()) continue;
      pairs.merges.emplace_back(left, right);
      symbols.push_back(left + right);
    }
    return pairs;
  }

  /// A byte as the character that both files write for it.
  static std::string shown(char byte) {
    auto const value = static_cast<unsigned char>(byte);
    unsigned code = value;
    if (value <= 0x20) code = 0x100u + value;
    if (value >= 0x7f && value <= 0xa0) code = 0x121u + value - 0x7fu;
    if (value == 0xad) code = 0x143;
    if (code < 0x80) return std::string(1, byte);
    return {static_cast<char>(0xc0u | code >> 6), static_cast<char>(0x80u | (code & 0x3fu))};
  }
  static std::string shown(std::string_view bytes) {
    std::string text;
    for (char const byte : bytes) text += shown(byte);
    return text;
  }

  /// All tokens as bytes, by id.
  std::vector<std::string> tokens() const {
    std::vector<std::string> all;
    for (int byte = 0; byte < 256; ++byte) all.emplace_back(1, static_cast<char>(byte));
    for (auto const& [left, right] : merges) all.push_back(left + right);
    if (marker) all.emplace_back("<|endoftext|>");
    return all;
  }
  std::string encoder_json() const {
    std::string json = "{";
    std::int64_t id = 0;
    for (auto const& token : tokens()) {
      json += id == 0 ? "\"" : ", \"";
      for (char const byte : token) json += (byte == '"' || byte == '\\' ? "\\" : "") + shown(byte);
      json += "\": " + std::to_string(id++);
    }
    return json + "}";
  }
  std::string vocab_bpe() const {
    std::string lines = "#version: 0.2\n";
    for (auto const& [left, right] : merges) lines += shown(left) + " " + shown(right) + "\n";
    return lines;
  }

  /// The ids of one word, found one rank after the other: wherever its pair stands, from the left, it is merged.
  std::vector<std::int64_t> encode_word(std::string_view word) const {
    std::vector<std::string> symbols;
    for (char const byte : word) symbols.emplace_back(1, byte);
    for (auto const& [left, right] : merges) {
      std::vector<std::string> merged;
      for (std::size_t i = 0; i < symbols.size(); ++i) {
        bool const pair = i + 1 < symbols.size() && symbols[i] == left && symbols[i + 1] == right;
        merged.push_back(pair ? left + right : symbols[i]);
        if (pair) ++i;
      }
      symbols = std::move(merged);
    }
    std::map<std::string, std::int64_t> ids;
    std::int64_t id = 0;
    for (auto const& token : tokens()) ids.emplace(token, id++);
    std::vector<std::int64_t> found;
    for (auto const& symbol : symbols) found.push_back(ids.at(symbol));
    return found;
  }
};

}  // namespace fsdp::testing
