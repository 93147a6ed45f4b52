// SPDX-License-Identifier: Apache-2.0
// SentencePiece's byte-pair encoding, the tokenizer of Llama 1 and 2, CodeLlama, TinyLlama and Mistral.
#pragma once

#include <array>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "transformer/tokenizer/merges.hpp"
#include "transformer/tokenizer/sentence_piece_model.hpp"
#include "transformer/tokenizer/tokenizer.hpp"

namespace transformer {

/// Byte-pair encoding over characters, which merges across words. Any text has ids; a byte that is not UTF-8 becomes
/// U+FFFD, as in SentencePiece.
///
/// Decoding gives the bytes of byte pieces as they are; SentencePiece writes U+FFFD for those that are not UTF-8.
/// Control pieces have no text.
class SentencePiece final : public Tokenizer {
 public:
  /// @param model  of read_sentence_piece_model or read_tokenizer_json, which check it
  explicit SentencePiece(SentencePieceModel model);

  std::int64_t size() const override { return std::ssize(model_.pieces); }
  std::optional<std::int64_t> end_of_text() const override { return model_.end_of_text; }
  TextTemplate text_template() const override { return model_.around_text; }
  std::vector<SpecialToken> special_tokens() const override { return model_.special_tokens; }
  void append(std::string_view text, std::vector<std::int64_t>& ids, WordCache& cache) const override;
  void append_rest(std::string_view text, std::vector<std::int64_t>& ids, WordCache& cache) const override;
  void append_behind_marker(std::string_view text, std::vector<std::int64_t>& ids, WordCache& cache) const override;
  std::string decode(std::span<std::int64_t const> ids) const override;
  std::string decode_rest(std::span<std::int64_t const> ids) const override;
  /// A place between two characters that no piece has side by side.
  std::size_t last_cut(std::string_view text) const override;

  /// append without words, which exist for speed alone: merges all of the text at once.
  void append_at_once(std::string_view text, std::vector<std::int64_t>& ids) const;

 private:
  using Id = Merges::Id;
  enum class Place : bool { beginning, rest };

  void append_words(std::string_view text, Place place, std::vector<std::int64_t>& ids, WordCache& cache) const;
  std::string decode_at(std::span<std::int64_t const> ids, Place place) const;

  void add_characters();
  void merge_by_score();
  void merge_as_listed();
  void join(std::string_view text);
  Id symbol_of(std::string_view text);

  std::string normalized(std::string_view text, Place place) const;
  /// The user-defined piece at a place; -1 if there is none.
  Id user_defined_at(std::string_view text, std::size_t place) const;
  std::size_t end_of_word(std::string_view text, std::size_t begin) const;
  bool joined(char32_t left, char32_t right) const;
  bool is_piece(char32_t character) const;
  void add_symbols(std::string_view text, std::vector<Id>& symbols) const;
  /// Merges symbols, and makes ids of them all.
  void finish(std::vector<Id>& symbols) const;

  static constexpr std::size_t table_size = 128;

  SentencePieceModel model_;
  std::array<Id, 256> byte_ids_{};
  Id unknown_ = 0;
  Merges merges_{0};
  std::unordered_map<char32_t, Id> characters_;  ///< symbols of one character
  /// Characters that are parts of pieces, but none themselves: their symbols are counted on from the pieces' ids.
  std::vector<std::string> parts_;
  std::array<std::vector<Id>, 256> user_defined_;  ///< by the first byte; the longest first
  /// Pairs of characters side by side in a piece: those of ASCII, the blank's symbol as a blank, and others.
  std::bitset<table_size * table_size> joined_ascii_;
  std::unordered_set<std::uint64_t> joined_;
};

}  // namespace transformer
