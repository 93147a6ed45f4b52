// SPDX-License-Identifier: Apache-2.0
// SentencePiece's models: ids and texts against the library's, and against merging one pair after the other.
// skip-tsan
//
// links: transformer_data
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "tests/catch.hpp"
#include "tests/support/messages.hpp"
#include "tests/support/sanitized.hpp"
#include "tests/support/tokenizer_files.hpp"
#include "tests/transformer/token_sums.hpp"
#include "tests/transformer/tokenizer_cases.hpp"
#include "transformer/tokenizer/sentence_piece.hpp"
#include "transformer/tokenizer/text_stream.hpp"
#include "transformer/tokenizer/utf8.hpp"

namespace {

using namespace transformer;
using fsdp::testing::all_texts;
using fsdp::testing::crossing_pieces;
using fsdp::testing::has;
using fsdp::testing::llama_pieces;
using fsdp::testing::piece_rows;
using fsdp::testing::PieceFile;
using fsdp::testing::PieceRow;
using fsdp::testing::replaced;
using fsdp::testing::user_defined_pieces;
using fsdp::testing::what;
using Ids = std::vector<std::int64_t>;
using namespace std::string_literals;

std::unique_ptr<SentencePiece> open(PieceFile const& file) {
  return std::make_unique<SentencePiece>(read_sentence_piece_model(file.bytes(), "'t.model'"));
}

struct NamedFile {
  std::string name;  ///< of the case
  PieceFile file;
};

std::vector<NamedFile> named_files() {
  auto plain = llama_pieces;
  for (auto& text : plain) text = replaced(text, blank_symbol, " ");
  auto const crossing = piece_rows(crossing_pieces, user_defined_pieces, false);
  return {{"llama", {.rows = piece_rows(llama_pieces)}},
          {"no prefix", {.rows = piece_rows(llama_pieces), .prefix = false}},
          {"removes blanks", {.rows = piece_rows(llama_pieces), .removes_blanks = true}},
          {"removes blanks, no prefix", {.rows = piece_rows(llama_pieces), .prefix = false, .removes_blanks = true}},
          {"unknown pieces", {.rows = piece_rows(llama_pieces, {}, false), .byte_fallback = false}},
          {"equal scores", {.rows = piece_rows(llama_pieces, {}, true, 9)}},
          {"plain blanks", {.rows = piece_rows(plain), .escapes_blanks = false}},
          {"user-defined", {.rows = crossing, .byte_fallback = false}},
          {"user-defined, removes blanks", {.rows = crossing, .removes_blanks = true, .byte_fallback = false}}};
}

/// The ids of a text by merging the best pair of all, one after the other. The vocabulary has the text's characters.
Ids merged_one_by_one(std::vector<PieceRow> const& rows, std::string_view text) {
  auto const find = [&](std::string const& piece) {
    return std::find_if(rows.begin(), rows.end(),
                        [&](PieceRow const& row) { return row.kind == 1 && row.text == piece; });
  };
  std::vector<std::string> symbols;
  for (char const byte : text) symbols.emplace_back(1, byte);
  while (true) {
    auto best = rows.end();
    std::size_t place = 0;
    for (std::size_t i = 0; i + 1 < symbols.size(); ++i)
      if (auto const row = find(symbols[i] + symbols[i + 1]);
          row != rows.end() && (best == rows.end() || row->score > best->score)) {
        best = row;
        place = i;
      }
    if (best == rows.end()) break;
    symbols[place] = best->text;
    symbols.erase(symbols.begin() + static_cast<std::ptrdiff_t>(place) + 1);
  }
  Ids ids;
  for (auto const& symbol : symbols) ids.push_back(find(symbol) - rows.begin());
  return ids;
}

}  // namespace

TEST_CASE("ids and decoded texts of SentencePiece models are those of its library") {
  for (auto const& [name, file] : named_files()) fsdp::testing::check_sums(name, *open(file), all_texts());
}

TEST_CASE("llama2.c's vocabulary is a SentencePiece model") {
  char const* const data = std::getenv("FSDP_TEST_DATA");
  if (data == nullptr) {
    WARN("skipped: FSDP_TEST_DATA is not set");
    return;
  }
  std::ifstream stream(std::string(data) + "/tok512.bin", std::ios::binary);
  std::string const file(std::istreambuf_iterator<char>(stream), {});
  auto const tokenizer = open({.rows = fsdp::testing::read_tok512(file)});
  CHECK(tokenizer->size() == 512);
  fsdp::testing::check_sums("tok512", *tokenizer, all_texts());
}

TEST_CASE("a text in words, in two parts or all at once has the same ids, and is decoded one by one as together") {
  for (auto const& [name, file] : named_files()) {
    INFO(name);
    auto const tokenizer = open(file);
    CHECK(fsdp::testing::check_cuts(*tokenizer, all_texts()) > 1000);
    for (auto const& text : all_texts()) {
      INFO("'" << text.substr(0, 80) << "'");
      auto const ids = tokenizer->encode(text);
      Ids at_once;
      tokenizer->append_at_once(text, at_once);
      CHECK(at_once == ids);
      TextStream stream(*tokenizer);
      std::string printed;
      for (auto const id : ids) printed += stream.add(id);
      printed += stream.end();
      CHECK(printed == tokenizer->decode(ids));
    }
  }
}

TEST_CASE("the best score is merged first, and of equal ones the leftmost") {
  std::mt19937 draw(1);
  for (int round = 0; round < 200; ++round) {
    PieceFile file{.rows = fsdp::testing::special_rows(false), .prefix = false, .byte_fallback = false};
    for (auto const* const letter : {"a", "b", "c"}) file.rows.push_back({letter, -100, 1});
    for (int i = 0; i < 14; ++i) {
      std::string piece(2 + draw() % 4, 'a');
      for (auto& letter : piece) letter = static_cast<char>('a' + draw() % 3);
      auto const twice =
          std::any_of(file.rows.begin(), file.rows.end(), [&](PieceRow const& row) { return row.text == piece; });
      if (!twice) file.rows.push_back({piece, -static_cast<float>(draw() % 5), 1});
    }
    auto const tokenizer = open(file);
    for (std::size_t const length : {1u, 2u, 5u, 20u, 60u, 200u}) {
      std::string text(length, 'a');
      for (auto& letter : text) letter = static_cast<char>('a' + draw() % 3);
      if (tokenizer->encode(text) != merged_one_by_one(file.rows, text)) FAIL("round " << round << ": " << text);
    }
  }
}

TEST_CASE("a megabyte of one letter is one word of a SentencePiece model, and takes no quadratic time") {
  PieceFile file{.rows = fsdp::testing::special_rows(false), .prefix = false, .byte_fallback = false};
  for (std::string text = "a"; text.size() <= 1024; text += text)
    file.rows.push_back({text, -static_cast<float>(text.size()), 1});
  std::size_t const words = fsdp::testing::sanitized ? 32 : 1024;
  auto const ids = open(file)->encode(std::string(words << 10u, 'a'));
  CHECK(ids == Ids(words, 3 + 10));
}

TEST_CASE("control pieces are ids on request alone, and have no text") {
  auto const tokenizer = open({.rows = piece_rows(llama_pieces)});
  CHECK(tokenizer->end_of_text() == 2);
  CHECK(tokenizer->special_tokens().size() == 2);
  auto const ids = tokenizer->encode("<s>the game</s><s>", Marker::token);
  REQUIRE(ids.size() > 3);
  CHECK(ids.front() == 1);
  CHECK(Ids(ids.end() - 2, ids.end()) == Ids{2, 1});
  CHECK(Ids(ids.begin() + 1, ids.end() - 2) == tokenizer->encode("the game"));
  CHECK(tokenizer->decode(ids) == "the game");
  CHECK(std::count(ids.begin(), ids.end(), 1) == 2);
  for (auto const id : tokenizer->encode("<s>the game</s><s>")) CHECK(id > 2);
  CHECK(tokenizer->decode(Ids{0}) == " \xe2\x81\x87 ");
}

TEST_CASE("of the special tokens that begin at one place, the longest counts") {
  auto rows = piece_rows(llama_pieces);
  rows.push_back({"<s>>", 0, 3});
  auto const tokenizer = open({.rows = rows});
  auto const longest = tokenizer->size() - 1;
  CHECK(tokenizer->encode("<s>><s><s>>", Marker::token) == Ids{longest, 1, longest});
}

TEST_CASE("a stream holds back the bytes of byte pieces until a character is whole") {
  auto const tokenizer = open({.rows = piece_rows(llama_pieces)});
  std::string const text = "x \xf0\x9f\x90\xb4 \xe2\x99\x9e";
  auto const ids = tokenizer->encode(text);
  TextStream stream(*tokenizer);
  std::string printed;
  for (auto const id : ids) {
    auto const part = stream.add(id);
    CHECK(last_whole_character(part) == part.size());
    printed += part;
  }
  CHECK(printed == text);
  // Bytes that are not UTF-8 stay as they are.
  CHECK(tokenizer->decode(Ids{3 + 0xff, 3 + 'a', 3 + 0xe2}) == "\xff"s + "a\xe2");
  // Control pieces before the first blank leave it out too, once.
  auto const blank = std::find(llama_pieces.begin(), llama_pieces.end(), blank_symbol) - llama_pieces.begin() + 259;
  CHECK(tokenizer->decode(Ids{1, blank, blank, 1, blank}) == "  ");
  CHECK(stream.end().empty());
  CHECK(stream.add(1) + stream.add(blank) + stream.add(blank) + stream.add(blank) == "  ");
}

TEST_CASE("models that SentencePiece's byte-pair encoding is not are refused by name") {
  auto const refused = [](PieceFile const& file) { return what([&] { open(file); }); };
  auto const rows = piece_rows(llama_pieces);
  for (auto const& [type, name] : {std::pair{1u, "unigram"}, {3u, "word"}, {4u, "char"}, {9u, "an unknown one"}})
    CHECK(refused({.rows = rows, .model_type = type}) == "'t.model': model type: expected bpe, got "s + name);
  CHECK(refused({.rows = rows, .normalizer = "nmt_nfkc"}) ==
        "'t.model': normalizer: expected identity, got 'nmt_nfkc'");
  CHECK(refused({.rows = rows, .normalizer = "nmt_nfkc", .character_map = "x"}) ==
        "'t.model': normalizer: expected identity, got 'nmt_nfkc', which changes characters");
  CHECK(has(refused({.rows = rows, .character_map = "x"}), "got 'identity', which changes characters"));
}

TEST_CASE("pieces that do not fit together are refused by id") {
  auto const refused = [](std::vector<PieceRow> rows, PieceRow const& row, bool byte_fallback = true) {
    rows.push_back(row);
    return what([&] { open({.rows = rows, .byte_fallback = byte_fallback}); });
  };
  auto const bytes = fsdp::testing::special_rows(true), none = fsdp::testing::special_rows(false);
  CHECK(refused(bytes, {"x", 0, 1}) == "nothing was thrown");
  CHECK(refused(bytes, {"<s>", 0, 1}) ==
        "'t.model': piece 259 ('<s>'): expected a text that no other piece has, got "
        "one that occurs twice");
  CHECK(has(refused(bytes, {"", 0, 1}), "piece 259: expected a text of 1 to 2048 bytes, got 0"));
  CHECK(has(refused(bytes, {std::string(2049, 'a'), 0, 1}), "expected a text of 1 to 2048 bytes, got 2049"));
  CHECK(has(refused(bytes, {"a\xff", 0, 1}), "piece 259 ('a\\xff'): expected a text in UTF-8"));
  CHECK(has(refused(bytes, {"x", 0, 5}),
            "piece 259 ('x'), type: expected normal, unknown, control, user-defined or "
            "byte, got unused"));
  CHECK(has(refused(bytes, {"x", 0, 7}), "or byte, got 7"));
  CHECK(has(refused(bytes, {"x", 0, 0}), "or byte, got 0"));
  CHECK(has(refused(bytes, {"x", NAN, 1}), "piece 259 ('x'), score: expected a finite number"));
  CHECK(has(refused(bytes, {"x", INFINITY, 1}), "score: expected a finite number"));
  CHECK(has(refused(bytes, {"x", 0, 3}), "piece 259 ('x'): expected two characters or more"));
  CHECK(has(refused(bytes, {"<unk2>", 0, 2}), "expected one unknown piece in a vocabulary, got a second one"));
  CHECK(has(refused(bytes, {"<0xfg>", 0, 6}), "expected a piece of a byte, <0x00> to <0xFF>"));
  CHECK(has(refused(none, {"<0x41>", 0, 6}, false), "expected no pieces of bytes in a model without byte_fallback"));
  CHECK(has(refused(none, {"x", 0, 1}), "byte_fallback: expected a piece '<0x00>', got none"));
  CHECK(has(refused({}, {"x", 0, 1}, false), "vocabulary: expected an unknown piece, got 1 others"));
  auto blank = piece_rows(llama_pieces);
  blank.push_back({"a b", 0, 4});
  CHECK(has(what([&] { open({.rows = blank, .removes_blanks = true}); }), "expected no blank in a user-defined piece"));
}

TEST_CASE("a tokenizer.model that is cut or damaged is refused, or read, and never breaks the program") {
  PieceFile const small{
      .rows = piece_rows({crossing_pieces.begin(), crossing_pieces.begin() + 60}, user_defined_pieces, false),
      .byte_fallback = false};
  auto const whole = small.bytes();
  std::size_t refused = 0, read = 0;
  auto const use = [&](std::string const& bytes) {
    try {
      SentencePiece const tokenizer(read_sentence_piece_model(bytes, "'t.model'"));
      auto const ids = tokenizer.encode("abc the <sep>\xff  \xe4\xb8\xad ", Marker::token);
      (void)tokenizer.decode(ids);
      ++read;
    } catch (fsdp::ConfigError const&) {
      ++refused;
    }
  };
  for (std::size_t size = 0; size < whole.size(); ++size) use(whole.substr(0, size));
  CHECK(refused > whole.size() - 8);  // the fields behind the model type may be missing
  std::mt19937 draw(2);
  for (int i = 0; i < 3000; ++i) {
    auto bytes = whole;
    for (auto flips = 1 + draw() % 3; flips > 0; --flips)
      bytes[draw() % bytes.size()] ^= static_cast<char>(1u << draw() % 8);
    use(bytes);
  }
  CHECK(read > 100);
  auto const cut = what([&] { (void)read_sentence_piece_model(whole.substr(0, whole.size() - 1), "'t.model'"); });
  CHECK(cut ==
        "'t.model', protobuf field 3: expected 16 more bytes, got 15; the file is cut, damaged, or of another kind");
}
