// SPDX-License-Identifier: Apache-2.0
// The vocabulary and the rules of a SentencePiece model of type BPE, and its file tokenizer.model.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "transformer/tokenizer/merges.hpp"
#include "transformer/tokenizer/tokenizer.hpp"

namespace transformer {

/// U+2581, which stands for a blank in pieces.
inline constexpr std::string_view blank_symbol = "\xe2\x96\x81";

/// Kinds of pieces, with the numbers of tokenizer.model.
enum class PieceKind : std::uint8_t {
  normal = 1,        ///< made by merging characters
  unknown = 2,       ///< stands for characters that the vocabulary lacks, if it has no pieces of bytes
  control = 3,       ///< never made from a text: <s>, </s>
  user_defined = 4,  ///< found in a text before anything is merged
  byte = 6,          ///< "<0x41>": a byte of a character that the vocabulary lacks
  added = 7          ///< found in a text by its marker, as a special token, but has a text: of no tokenizer.model
};

struct VocabularyPiece {
  std::string text;
  float score = 0;  ///< of those that can be made by merging, the highest is made first
  PieceKind kind = PieceKind::normal;
};

/// When a text gets a blank before it that it does not have.
enum class BlankBefore : std::uint8_t { never, always, unless_there };

struct SentencePieceModel {
  std::vector<VocabularyPiece> pieces;  ///< by id
  /// HuggingFace's files list the merges: left, right, merged, the lowest rank first. Without a list, any two symbols
  /// merge whose texts together are a normal piece.
  std::optional<std::vector<std::array<Merges::Id, 3>>> merges;
  bool byte_fallback = false;  ///< characters that the vocabulary lacks become pieces of bytes
  BlankBefore blank_before = BlankBefore::always;
  bool blank_behind_markers = true;             ///< `blank_before` holds for the text behind a marker too
  bool drops_first_blank = true;                ///< decode leaves out the blank that a text begins with
  bool removes_extra_blanks = false;            ///< at both ends of a text, and all but one of several
  bool escapes_blanks = true;                   ///< blanks become `blank_symbol`
  bool splits_before_blanks = false;            ///< no piece has a `blank_symbol` but at its beginning
  std::string unknown_text = " \xe2\x81\x87 ";  ///< decode writes it for the unknown piece
  std::vector<SpecialToken> special_tokens;
  TextTemplate around_text;
  std::optional<std::int64_t> begin_of_text, end_of_text;  ///< the tokens that the file names for this
};

/// The byte that a piece like "<0x41>" stands for.
std::optional<unsigned char> byte_of_piece(std::string_view piece);

/// Ids of the pieces for the 256 bytes.
/// @param what  the file is, for messages: "'path'"
/// @throws fsdp::ConfigError naming the first byte without a piece
std::array<Merges::Id, 256> byte_pieces(std::vector<VocabularyPiece> const& pieces, std::string_view what);

/// Reads tokenizer.model, a protobuf message (sentencepiece_model.proto of google/sentencepiece).
/// @param bytes  the file's contents
/// @param what   the file is, for messages: "'path'"
/// @throws fsdp::ConfigError naming the field if the file is damaged, or has what we do not compute as SentencePiece
/// does: other model types than BPE, normalizers that change characters, unused pieces
SentencePieceModel read_sentence_piece_model(std::string_view bytes, std::string_view what);

}  // namespace transformer
