// SPDX-License-Identifier: Apache-2.0
// Any bytes as tokenizer.model or tokenizer.json, or as changes to good ones: refused by name, or a tokenizer that has
// the same ids for a text in two parts. Texts of any bytes, too.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/error.hpp"
#include "tests/fuzz/targets/changed.hpp"
#include "tests/support/tokenizer_files.hpp"
#include "transformer/tokenizer/sentence_piece.hpp"
#include "transformer/tokenizer/tokenizer_json.hpp"

namespace {

void use(transformer::Tokenizer const& tokenizer, std::string_view text) {
  auto const ids = tokenizer.encode(text);
  static_cast<void>(tokenizer.decode(tokenizer.encode(text, transformer::Marker::token)));
  auto const cut = tokenizer.last_cut(text);
  std::vector<std::int64_t> parts;
  transformer::WordCache cache(16);
  if (cut > 0) tokenizer.append(text.substr(0, cut), parts, cache);
  if (cut > 0) tokenizer.append_rest(text.substr(cut), parts, cache);
  if (cut > 0 && parts != ids) std::abort();
  if (auto const* const pieces = dynamic_cast<transformer::SentencePiece const*>(&tokenizer)) {
    parts.clear();
    pieces->append_at_once(text, parts);
    if (parts != ids) std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* data, std::size_t size) {
  namespace ft = fsdp::testing;
  static std::vector<std::string> const pieces{"\xe2\x96\x81",
                                               "a",
                                               "b",
                                               "\xe2\x96\x81"
                                               "a",
                                               "ab",
                                               "aba",
                                               "b\xe2\x96\x81",
                                               "\xe4\xb8\xad"};
  static auto const model =
      ft::PieceFile{
          .rows = ft::piece_rows(pieces, {"<x>", "bb"}, false), .removes_blanks = true, .byte_fallback = false}
          .bytes();
  static auto const of_pieces = ft::piece_json(pieces).dump(), of_bytes = ft::byte_json({"ab", "aba"}, "llama3").dump();
  if (size == 0) return 0;
  std::string_view const rest(reinterpret_cast<char const*>(data) + 1, size - 1);
  auto const& base = data[0] % 3 == 0 ? model : data[0] % 3 == 1 ? of_pieces : of_bytes;
  auto const file = data[0] % 2 == 0 ? ft::changed(base, rest) : data[0] % 16 == 1 ? std::string(rest) : base;
  try {
    std::unique_ptr<transformer::Tokenizer> tokenizer;
    if (data[0] % 3 == 0)
      tokenizer = std::make_unique<transformer::SentencePiece>(transformer::read_sentence_piece_model(file, "'m'"));
    else
      tokenizer = transformer::read_tokenizer_json(file, "'j'");
    use(*tokenizer, rest);
    use(*tokenizer, "ab  abab<x>bb a\xe4\xb8\xad<s>");
  } catch (fsdp::ConfigError const&) {
  }
  return 0;
}
