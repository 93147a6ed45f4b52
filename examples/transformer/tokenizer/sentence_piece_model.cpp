// SPDX-License-Identifier: Apache-2.0
// Reads tokenizer.model.
#include "transformer/tokenizer/sentence_piece_model.hpp"

#include <array>
#include <cmath>
#include <unordered_set>
#include <utility>

#include "fsdp/error.hpp"
#include "transformer/data/excerpt.hpp"
#include "transformer/tokenizer/protobuf_reader.hpp"
#include "transformer/tokenizer/utf8.hpp"

namespace transformer {
namespace {

constexpr std::size_t most_pieces = 1u << 22u;
constexpr std::size_t longest_piece = 2048;  // bytes: SentencePiece makes none of more than 512 characters

/// Reads the message ModelProto.
class SentencePieceReader {
 public:
  explicit SentencePieceReader(std::string_view what) : what_(what) {}

  SentencePieceModel read(std::string_view bytes) {
    for (ProtobufReader message(bytes, what_); message.next();) {
      switch (message.number()) {
        case 1: add_piece(message.bytes()); break;
        case 2: read_trainer(message.bytes()); break;
        case 3: read_normalizer(message.bytes()); break;
        case 5: read_denormalizer(message.bytes()); break;
        default: break;  // tests of the model, which SentencePiece keeps there
      }
    }
    expect_supported();
    expect_pieces();
    return std::move(model_);
  }

 private:
  [[noreturn]] void wrong(std::string_view field, std::string_view expected, std::string_view got) const {
    fsdp::fail<fsdp::ConfigError>("{}: {}: expected {}, got {}", what_, field, expected, got);
  }
  std::string piece_name(std::size_t id) const {
    return fsdp::formatted("piece {} ('{}')", id, excerpt(model_.pieces[id].text));
  }

  void add_piece(std::string_view bytes) {
    auto const id = model_.pieces.size();
    if (id == most_pieces) wrong("vocabulary", fsdp::formatted("at most {} pieces", most_pieces), "more");
    auto& piece = model_.pieces.emplace_back();
    std::uint64_t kind = 1;
    for (ProtobufReader message(bytes, what_); message.next();) {
      if (message.number() == 1) piece.text = message.bytes();
      if (message.number() == 2) piece.score = message.number32();
      if (message.number() == 3) kind = message.whole();
    }
    if (kind == 0 || kind == 5 || kind > 6)
      wrong(piece_name(id) + ", type", "normal, unknown, control, user-defined or byte",
            kind == 5 ? std::string("unused") : fsdp::formatted("{}", kind));
    piece.kind = static_cast<PieceKind>(kind);
    if (piece.text.empty() || piece.text.size() > longest_piece)
      wrong(fsdp::formatted("piece {}", id), fsdp::formatted("a text of 1 to {} bytes", longest_piece),
            fsdp::formatted("{}", piece.text.size()));
    if (!std::isfinite(piece.score)) wrong(piece_name(id) + ", score", "a finite number", "another");
  }
  void read_trainer(std::string_view bytes) {
    for (ProtobufReader message(bytes, what_); message.next();) {
      switch (message.number()) {
        case 3: model_type_ = message.whole(); break;
        case 24: blank_as_suffix_ = message.flag(); break;
        case 35: model_.byte_fallback = message.flag(); break;
        case 44: model_.unknown_text = message.bytes(); break;
        case 46: begin_ = message.bytes(); break;
        case 47: end_ = message.bytes(); break;
        default: break;  // how the model was trained
      }
    }
  }
  void read_normalizer(std::string_view bytes) {
    for (ProtobufReader message(bytes, what_); message.next();) {
      switch (message.number()) {
        case 1: normalizer_ = message.bytes(); break;
        case 2: changes_characters_ = !message.bytes().empty(); break;
        case 3: model_.blank_before = message.flag() ? BlankBefore::always : BlankBefore::never; break;
        case 4: removes_extra_blanks_ = message.flag(); break;
        case 5: model_.escapes_blanks = message.flag(); break;
        default: break;
      }
    }
  }
  void read_denormalizer(std::string_view bytes) {
    for (ProtobufReader message(bytes, what_); message.next();)
      if (message.number() == 2 && !message.bytes().empty())
        wrong("denormalizer", "none", "one that changes characters");
  }

  void expect_supported() {
    constexpr std::array<std::string_view, 5> types{"none", "unigram", "bpe", "word", "char"};
    if (model_type_ != 2)
      wrong("model type", "bpe", model_type_ < types.size() ? types[model_type_] : "an unknown one");
    if (changes_characters_ || !(normalizer_.empty() || normalizer_ == "identity"))
      wrong("normalizer", "identity",
            fsdp::formatted("'{}'{}", excerpt(normalizer_), changes_characters_ ? ", which changes characters" : ""));
    if (blank_as_suffix_) wrong("treat_whitespace_as_suffix", "false", "true");
    model_.removes_extra_blanks = removes_extra_blanks_;
    model_.drops_first_blank = model_.blank_before == BlankBefore::always || removes_extra_blanks_;
  }

  void expect_pieces() {
    std::unordered_set<std::string_view> texts;
    std::optional<std::size_t> unknown;
    for (std::size_t id = 0; id < model_.pieces.size(); ++id) {
      auto const& [text, score, kind] = model_.pieces[id];
      if (!texts.insert(text).second) wrong(piece_name(id), "a text that no other piece has", "one that occurs twice");
      if (count_characters(text) < 2 && kind != PieceKind::normal && kind != PieceKind::user_defined)
        wrong(piece_name(id), "two characters or more in a piece that is not made from a text", "one");
      for (std::size_t offset = 0; offset < text.size();) {
        auto const character = utf8_at(text, offset);
        if (!character.valid) wrong(piece_name(id), "a text in UTF-8", "another");
        offset += character.length;
      }
      if (kind == PieceKind::unknown && std::exchange(unknown, id))
        wrong(piece_name(id), "one unknown piece in a vocabulary", "a second one");
      if (kind == PieceKind::byte && !model_.byte_fallback)
        wrong(piece_name(id), "no pieces of bytes in a model without byte_fallback", "one");
      if (kind == PieceKind::byte && !byte_of_piece(text))
        wrong(piece_name(id), "a piece of a byte, <0x00> to <0xFF>", "another");
      if (kind == PieceKind::user_defined && removes_extra_blanks_ && text.find(' ') != std::string::npos)
        wrong(piece_name(id), "no blank in a user-defined piece of a model that removes extra blanks", "one");
      if (kind != PieceKind::control) continue;
      model_.special_tokens.push_back({text, static_cast<std::int64_t>(id)});
      if (text == begin_) model_.begin_of_text = static_cast<std::int64_t>(id);
      if (text == end_) model_.end_of_text = static_cast<std::int64_t>(id);
    }
    if (!unknown) wrong("vocabulary", "an unknown piece", fsdp::formatted("{} others", model_.pieces.size()));
    if (model_.byte_fallback) static_cast<void>(byte_pieces(model_.pieces, what_));
  }

  std::string_view what_;
  SentencePieceModel model_;
  std::uint64_t model_type_ = 1;
  bool blank_as_suffix_ = false, changes_characters_ = false, removes_extra_blanks_ = true;
  std::string normalizer_, begin_ = "<s>", end_ = "</s>";
};

}  // namespace

std::optional<unsigned char> byte_of_piece(std::string_view piece) {
  if (piece.size() != 6 || !piece.starts_with("<0x") || piece[5] != '>') return std::nullopt;
  constexpr std::string_view digits = "0123456789ABCDEF";
  auto const high = digits.find(piece[3]), low = digits.find(piece[4]);
  if (high == std::string_view::npos || low == std::string_view::npos) return std::nullopt;
  return static_cast<unsigned char>(16 * high + low);
}

std::array<Merges::Id, 256> byte_pieces(std::vector<VocabularyPiece> const& pieces, std::string_view what) {
  std::array<Merges::Id, 256> ids{};
  ids.fill(-1);
  for (std::size_t id = 0; id < pieces.size(); ++id)
    if (pieces[id].kind == PieceKind::byte)
      if (auto const byte = byte_of_piece(pieces[id].text)) ids[*byte] = static_cast<Merges::Id>(id);
  for (unsigned byte = 0; byte < ids.size(); ++byte)
    if (ids[byte] < 0)
      fsdp::fail<fsdp::ConfigError>("{}: byte_fallback: expected a piece '<0x{:02X}>', got none", what, byte);
  return ids;
}

SentencePieceModel read_sentence_piece_model(std::string_view bytes, std::string_view what) {
  return SentencePieceReader(what).read(bytes);
}

}  // namespace transformer
