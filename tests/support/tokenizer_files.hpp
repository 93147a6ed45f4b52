// SPDX-License-Identifier: Apache-2.0
// Writes files of tokenizers from vocabularies: tokenizer.model, and tokenizer.json of both kinds.
// make_tokenizer_cases.py has the same files.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fsdp::testing {

/// A message in protobuf's wire format.
class ProtobufMessage {
 public:
  ProtobufMessage& whole(std::uint32_t field, std::uint64_t value) {
    varint(field << 3u);
    varint(value);
    return *this;
  }
  ProtobufMessage& number(std::uint32_t field, float value) {
    varint(field << 3u | 5u);
    auto const bits = std::bit_cast<std::uint32_t>(value);
    for (unsigned shift = 0; shift < 32; shift += 8) bytes_ += static_cast<char>(bits >> shift & 0xffu);
    return *this;
  }
  ProtobufMessage& text(std::uint32_t field, std::string_view value) {
    varint(field << 3u | 2u);
    varint(value.size());
    bytes_ += value;
    return *this;
  }
  std::string const& bytes() const { return bytes_; }

 private:
  void varint(std::uint64_t value) {
    for (; value >= 0x80; value >>= 7u) bytes_ += static_cast<char>((value & 0x7fu) | 0x80u);
    bytes_ += static_cast<char>(value);
  }
  std::string bytes_;
};

struct PieceRow {
  std::string text;
  float score = 0;
  std::uint64_t kind = 1;
};

/// Settings of a tokenizer.model; the defaults are those of Llama.
struct PieceFile {
  std::vector<PieceRow> rows;
  bool prefix = true, removes_blanks = false, escapes_blanks = true, byte_fallback = true;
  std::uint64_t model_type = 2;
  std::string normalizer = "identity", character_map = "";

  std::string bytes() const {
    ProtobufMessage model;
    for (auto const& [text, score, kind] : rows)
      model.text(1, ProtobufMessage().text(1, text).number(2, score).whole(3, kind).bytes());
    model.text(2, ProtobufMessage().whole(3, model_type).whole(35, byte_fallback ? 1 : 0).bytes());
    ProtobufMessage rules;
    rules.text(1, normalizer);
    if (!character_map.empty()) rules.text(2, character_map);
    rules.whole(3, prefix ? 1 : 0).whole(4, removes_blanks ? 1 : 0).whole(5, escapes_blanks ? 1 : 0);
    return model.text(3, rules.bytes()).bytes();
  }
};

/// <unk>, <s>, </s> and, if wanted, the pieces of bytes.
inline std::vector<PieceRow> special_rows(bool byte_fallback) {
  std::vector<PieceRow> rows{{"<unk>", 0, 2}, {"<s>", 0, 3}, {"</s>", 0, 3}};
  constexpr std::string_view digits = "0123456789ABCDEF";
  for (std::size_t byte = 0; byte < 256 && byte_fallback; ++byte)
    rows.push_back({std::string("<0x") + digits[byte / 16] + digits[byte % 16] + ">", 0, 6});
  return rows;
}

/// @param user  user-defined pieces; with them there is a control piece <cls>
/// @param ties  so many pieces in a row have one score
inline std::vector<PieceRow> piece_rows(std::vector<std::string> const& pieces,
                                        std::vector<std::string> const& user = {}, bool byte_fallback = true,
                                        std::size_t ties = 1) {
  auto rows = special_rows(byte_fallback);
  for (auto const& text : user) rows.push_back({text, 0, 4});
  if (!user.empty()) rows.push_back({"<cls>", 0, 3});
  for (std::size_t i = 0; i < pieces.size(); ++i) rows.push_back({pieces[i], -static_cast<float>(i / ties), 1});
  return rows;
}

inline std::string replaced(std::string text, std::string_view from, std::string_view to) {
  for (auto at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size()))
    text.replace(at, from.size(), to);
  return text;
}

/// The rows of llama2.c's tok512.bin, a vocabulary of SentencePiece: the longest length, then score, length and bytes
/// of each piece, whose blanks stand as they are.
inline std::vector<PieceRow> read_tok512(std::string const& file) {
  auto rows = special_rows(true);
  std::size_t at = 4;
  for (std::size_t id = 0; id < 512; ++id) {
    float score = 0;
    std::int32_t length = 0;
    std::memcpy(&score, file.data() + at, 4);
    std::memcpy(&length, file.data() + at + 4, 4);
    auto const text = file.substr(at + 8, static_cast<std::size_t>(length));
    at += 8 + static_cast<std::size_t>(length);
    if (id >= 259) rows.push_back({replaced(text, " ", "\xe2\x96\x81"), score, 1});
  }
  return rows;
}

using TokenizerJson = nlohmann::ordered_json;

/// Each way to make each token of two, in the tokens' order. Tokens are cut between bytes: pieces of a character are no
/// tokens.
inline std::vector<std::pair<std::string, std::string>> all_merges(std::vector<std::string> const& tokens,
                                                                   std::vector<std::string> const& known) {
  std::set<std::string> const set(known.begin(), known.end());
  std::vector<std::pair<std::string, std::string>> merges;
  for (auto const& token : tokens)
    for (std::size_t i = 1; i < token.size(); ++i)
      if (set.contains(token.substr(0, i)) && set.contains(token.substr(i)))
        merges.emplace_back(token.substr(0, i), token.substr(i));
  return merges;
}

inline TokenizerJson special_token(std::string const& text, std::size_t id) {
  return {{"id", id},        {"content", text},     {"single_word", false}, {"lstrip", false},
          {"rstrip", false}, {"normalized", false}, {"special", true}};
}

inline TokenizerJson tokenizer_json(TokenizerJson added, TokenizerJson model) {
  model.update({{"type", "BPE"},
                {"dropout", nullptr},
                {"continuing_subword_prefix", nullptr},
                {"end_of_word_suffix", nullptr},
                {"fuse_unk", true}});
  return {{"version", "1.0"},          {"truncation", nullptr}, {"padding", nullptr},
          {"added_tokens", added},     {"normalizer", nullptr}, {"pre_tokenizer", nullptr},
          {"post_processor", nullptr}, {"decoder", nullptr},    {"model", model}};
}

/// tokenizer.json of a vocabulary of SentencePiece: a normalizer prepends a blank, or else Metaspace has the scheme.
inline TokenizerJson piece_json(std::vector<std::string> const& pieces, std::string const& scheme = "",
                                bool split = false) {
  std::string const blank = "\xe2\x96\x81";
  TokenizerJson added = TokenizerJson::array(), vocab, merges = TokenizerJson::array();
  for (auto const& [text, score, kind] : piece_rows(pieces)) {
    if (kind == 2 || kind == 3) added.push_back(special_token(text, vocab.size()));
    vocab[text] = vocab.size();
  }
  for (auto const& [left, right] : all_merges(pieces, pieces)) merges.push_back(left + " " + right);
  auto json = tokenizer_json(added, {{"unk_token", "<unk>"},
                                     {"byte_fallback", true},
                                     {"ignore_merges", false},
                                     {"vocab", vocab},
                                     {"merges", merges}});
  auto const replace = [](std::string const& from, std::string const& to) {
    return TokenizerJson{{"type", "Replace"}, {"pattern", {{"String", from}}}, {"content", to}};
  };
  TokenizerJson const prepend{{"type", "Prepend"}, {"prepend", blank}};
  auto normalizers = TokenizerJson::array(), decoders = TokenizerJson::array();
  normalizers.push_back(prepend);
  normalizers.push_back(replace(" ", blank));
  decoders.push_back(replace(blank, " "));
  decoders.push_back({{"type", "ByteFallback"}});
  decoders.push_back({{"type", "Fuse"}});
  if (scheme != "never") decoders.push_back({{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}});
  json["decoder"] = {{"type", "Sequence"}, {"decoders", decoders}};
  if (scheme.empty())
    json["normalizer"] = {{"type", "Sequence"}, {"normalizers", normalizers}};
  else
    json["pre_tokenizer"] = {
        {"type", "Metaspace"}, {"replacement", blank}, {"prepend_scheme", scheme}, {"split", split}};
  return json;
}

/// Encodes U+0000 to U+07FF.
inline std::string short_utf8(unsigned code) {
  if (code < 0x80) return {static_cast<char>(code)};
  return {static_cast<char>(0xc0u | code >> 6u), static_cast<char>(0x80u | (code & 0x3fu))};
}

/// The characters that stand for bytes.
inline std::vector<std::string> byte_characters() {
  std::vector<std::string> characters;
  for (unsigned byte = 0, next = 0x100; byte < 256; ++byte) {
    bool const prints = (byte > 0x20 && byte < 0x7f) || (byte > 0xa0 && byte != 0xad);
    characters.push_back(short_utf8(prints ? byte : next++));
  }
  return characters;
}

inline constexpr std::string_view llama3_regex = R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|)"
                                                 R"( ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

/// tokenizer.json of a vocabulary over bytes.
/// @param words  "gpt2", "digits" or "llama3"
inline TokenizerJson byte_json(std::vector<std::string> const& tokens, std::string const& words,
                               bool whole_words = false, bool special_first = false) {
  std::vector<std::string> const special{"<|endoftext|>", "<|im_start|>", "<|im_end|>"};
  auto plain = byte_characters();
  plain.insert(plain.end(), tokens.begin(), tokens.end());
  TokenizerJson added = TokenizerJson::array(), vocab, merges = TokenizerJson::array();
  if (special_first)
    for (auto const& text : special) vocab[text] = vocab.size();
  for (auto const& text : plain) vocab[text] = vocab.size();
  for (std::size_t i = 0; i < special.size(); ++i)
    added.push_back(special_token(special[i], special_first ? i : vocab.size() + i));
  for (auto const& [left, right] : all_merges(tokens, plain)) merges.push_back(TokenizerJson::array({left, right}));
  auto json = tokenizer_json(added, {{"unk_token", nullptr},
                                     {"byte_fallback", false},
                                     {"ignore_merges", whole_words},
                                     {"vocab", vocab},
                                     {"merges", merges}});
  TokenizerJson level{
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", words != "llama3"}};
  json["decoder"] = level;
  TokenizerJson const digits{{"type", "Digits"}, {"individual_digits", true}};
  TokenizerJson const split{{"type", "Split"},
                            {"pattern", {{"Regex", std::string(llama3_regex)}}},
                            {"behavior", "Isolated"},
                            {"invert", false}};
  json["pre_tokenizer"] = level;
  if (words != "gpt2")
    json["pre_tokenizer"] = {{"type", "Sequence"},
                             {"pretokenizers", TokenizerJson::array({words == "digits" ? digits : split, level})}};
  return json;
}

}  // namespace fsdp::testing
