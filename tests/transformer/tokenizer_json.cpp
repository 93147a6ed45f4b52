// SPDX-License-Identifier: Apache-2.0
// tokenizer.json: ids and texts against those of HuggingFace's library, and what is refused.
// skip-tsan
//
// links: transformer_data
#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "tests/catch.hpp"
#include "tests/support/messages.hpp"
#include "tests/support/temporary_folder.hpp"
#include "tests/support/tokenizer_files.hpp"
#include "tests/transformer/token_sums.hpp"
#include "tests/transformer/tokenizer_cases.hpp"
#include "transformer/tokenizer/byte_pair.hpp"
#include "transformer/tokenizer/sentence_piece.hpp"
#include "transformer/tokenizer/tokenizer_folder.hpp"
#include "transformer/tokenizer/tokenizer_json.hpp"

namespace {

using namespace transformer;
using fsdp::testing::byte_json;
using fsdp::testing::byte_tokens;
using fsdp::testing::has;
using fsdp::testing::llama_pieces;
using fsdp::testing::piece_json;
using fsdp::testing::PieceFile;
using fsdp::testing::replaced;
using fsdp::testing::TemporaryFolder;
using fsdp::testing::tokenizer_texts;
using fsdp::testing::TokenizerJson;
using fsdp::testing::what;
using Ids = std::vector<std::int64_t>;

std::unique_ptr<Tokenizer> open(TokenizerJson const& json) { return read_tokenizer_json(json.dump(), "'t.json'"); }

struct NamedJson {
  std::string name;  ///< of the case
  TokenizerJson json;
  bool pieces;
};

std::vector<NamedJson> named_files() {
  return {{"Prepend", piece_json(llama_pieces), true},
          {"first false", piece_json(llama_pieces, "first", false), true},
          {"always true", piece_json(llama_pieces, "always", true), true},
          {"never true", piece_json(llama_pieces, "never", true), true},
          {"gpt2", byte_json(byte_tokens, "gpt2"), false},
          {"digits", byte_json(byte_tokens, "digits", false, true), false},
          {"llama3", byte_json(byte_tokens, "llama3", true), false},
          {"llama3 merged", byte_json(byte_tokens, "llama3"), false}};
}

/// The error for a file after a change.
std::string refused(TokenizerJson json, std::function<void(TokenizerJson&)> const& change) {
  change(json);
  return what([&] { open(json); });
}

}  // namespace

TEST_CASE("ids and decoded texts of tokenizer.json are those of HuggingFace's library") {
  auto without_unknown = tokenizer_texts;
  for (auto& text : without_unknown) text = replaced(text, "<unk>", "");
  for (auto const& [name, json, pieces] : named_files()) {
    auto const tokenizer = open(json);
    fsdp::testing::check_sums(name, *tokenizer, tokenizer_texts);
    fsdp::testing::check_sums(name + " token", *tokenizer, pieces ? without_unknown : tokenizer_texts, Marker::token);
  }
}

TEST_CASE("a text of a tokenizer.json has the same ids in two parts") {
  auto texts = fsdp::testing::all_texts();
  for (auto const& [name, json, pieces] : named_files()) {
    INFO(name);
    auto const tokenizer = open(json);
    CHECK(fsdp::testing::check_cuts(*tokenizer, texts) > 1000);
    if (pieces) continue;
    for (auto const& text : texts) CHECK(tokenizer->decode(tokenizer->encode(text)) == text);
  }
}

TEST_CASE("Metaspace that splits keeps pieces from going across blanks") {
  std::string const blank(blank_symbol);
  std::vector<std::string> const pieces{blank, "e", "e" + blank, "e" + blank + "e", blank + "e"};
  auto const ids = [&](bool split) { return open(piece_json(pieces, "never", split))->encode("e e"); };
  CHECK(ids(false) == Ids{259 + 3});
  CHECK(ids(true) == Ids{259 + 1, 259 + 4});
}

TEST_CASE("tokenizer.json and tokenizer.model of one vocabulary agree") {
  TemporaryFolder const folder;
  auto const path = folder.file("tokenizer.model", PieceFile{.rows = fsdp::testing::piece_rows(llama_pieces)}.bytes());
  auto const model = open_tokenizer_folder(folder.path, 1000);
  folder.file("tokenizer.json", piece_json(llama_pieces).dump());
  std::filesystem::remove(path);
  auto const json = open_tokenizer_folder(folder.path, 1000);
  CHECK(json->size() == model->size());
  CHECK(json->end_of_text() == model->end_of_text());
  for (auto const& text : fsdp::testing::all_texts()) {
    auto const ids = json->encode(text);
    CHECK(ids == model->encode(text));
    CHECK(json->decode(ids) == model->decode(ids));
    if (!has(text, "<unk>")) CHECK(json->encode(text, Marker::token) == model->encode(text, Marker::token));
  }
}

TEST_CASE("a folder without a tokenizer, or with one that is larger than the model's vocabulary, is refused") {
  TemporaryFolder const folder;
  CHECK_FALSE(has_tokenizer(folder.path));
  CHECK(has(what([&] { open_tokenizer_folder(folder.path, 1000); }),
            "expected tokenizer.json or tokenizer.model, got neither"));
  folder.file("tokenizer.json", byte_json(byte_tokens, "gpt2").dump());
  CHECK(has_tokenizer(folder.path));
  auto const size = static_cast<std::int64_t>(256 + byte_tokens.size() + 3);
  CHECK(open_tokenizer_folder(folder.path, size)->size() == size);
  CHECK(has(
      what([&] { open_tokenizer_folder(folder.path, size - 1); }),
      fsdp::formatted("tokenizer.json': expected at most {} tokens, the model's vocab_size, got {}", size - 1, size)));
}

TEST_CASE("what a tokenizer.json has that we do not compute as the library does is refused with its field") {
  auto const pieces = piece_json(llama_pieces), metaspace = piece_json(llama_pieces, "first"),
             bytes = byte_json(byte_tokens, "llama3"), digits = byte_json(byte_tokens, "digits");
  using Json = TokenizerJson;
  CHECK(refused(bytes, [](Json&) {}) == "nothing was thrown");
  CHECK(refused(bytes, [](Json& j) { j["model"]["type"] = "Unigram"; }) ==
        "'t.json': model.type: expected \"BPE\", got \"Unigram\"");
  CHECK(has(refused(bytes, [](Json& j) { j["model"].erase("type"); }), "model.type: expected a string, got nothing"));
  CHECK(has(refused(bytes, [](Json& j) { j["model"] = 3; }), "model: expected an object with a \"type\", got 3"));
  CHECK(has(refused(bytes, [](Json& j) { j["model"]["dropout"] = 0.1; }), "model.dropout: expected null, got 0.1"));
  CHECK(has(refused(bytes, [](Json& j) { j["model"]["end_of_word_suffix"] = "</w>"; }),
            "model.end_of_word_suffix: expected null, got \"</w>\""));
  CHECK(
      has(refused(bytes, [](Json& j) { j["model"]["new"] = 1; }), "model.new: expected no field of this name, got 1"));
  CHECK(has(refused(bytes, [](Json& j) { j["new"] = 1; }), "new: expected no field of this name"));
  CHECK(has(refused(bytes, [](Json& j) { j["version"] = "2.0"; }), "version: expected \"1.0\", got \"2.0\""));
  CHECK(has(refused(bytes,
                    [](Json& j) {
                      j["normalizer"] = Json{{"type", "NFC"}};
                    }),
            "normalizer: expected null, or an empty Sequence, got {\"type\":\"NFC\"}"));
  CHECK(has(refused(bytes,
                    [](Json& j) {
                      j["decoder"] = Json{{"type", "BPEDecoder"}};
                    }),
            "decoder: expected \"ByteLevel\", got"));
  CHECK(has(refused(bytes,
                    [](Json& j) {
                      j["post_processor"] = Json{{"type", "BertProcessing"}};
                    }),
            "post_processor.type: expected \"TemplateProcessing\" or \"ByteLevel\", got \"BertProcessing\""));

  CHECK(has(refused(bytes, [](Json& j) { j["pre_tokenizer"] = nullptr; }), "pre_tokenizer: expected ByteLevel, or"));
  CHECK(has(refused(bytes,
                    [](Json& j) {
                      j["pre_tokenizer"] = Json{{"type", "Whitespace"}};
                    }),
            "expected ByteLevel, or"));
  CHECK(has(refused(bytes, [](Json& j) { j["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "\\w+"; }),
            "pre_tokenizer.pretokenizers[0]: expected {"));
  CHECK(has(refused(bytes, [](Json& j) { j["pre_tokenizer"]["pretokenizers"][0]["behavior"] = "Removed"; }),
            "[0]: expected {"));
  CHECK(has(refused(bytes, [](Json& j) { j["pre_tokenizer"]["pretokenizers"][1]["use_regex"] = true; }),
            "pre_tokenizer.pretokenizers[1].use_regex: expected false, got true"));
  CHECK(has(refused(digits, [](Json& j) { j["pre_tokenizer"]["pretokenizers"][1]["use_regex"] = false; }),
            "use_regex: expected true, got false"));
  CHECK(has(refused(digits, [](Json& j) { j["pre_tokenizer"]["pretokenizers"][1]["add_prefix_space"] = true; }),
            "add_prefix_space: expected false, got true"));
  CHECK(has(refused(digits, [](Json& j) { j["pre_tokenizer"]["pretokenizers"][0]["individual_digits"] = false; }),
            "pre_tokenizer.pretokenizers[0]: expected {"));

  CHECK(has(refused(pieces, [](Json& j) { j["normalizer"]["normalizers"][1]["content"] = "_"; }),
            "normalizer.normalizers[1]: expected Prepend or Replace of a blank by U+2581"));
  CHECK(has(refused(pieces, [](Json& j) { j["normalizer"] = nullptr; }),
            "pre_tokenizer: expected \"Metaspace\", got nothing"));
  CHECK(has(refused(pieces,
                    [](Json& j) {
                      j["pre_tokenizer"] = Json{{"type", "Metaspace"}};
                    }),
            "pre_tokenizer: expected null behind a normalizer of blanks"));
  CHECK(has(refused(pieces, [](Json& j) { j["decoder"]["decoders"].erase(0); }), "decoder.decoders[0]: expected {"));
  CHECK(has(refused(pieces, [](Json& j) { j["decoder"] = nullptr; }), "decoder: expected a Sequence of Replace"));
  CHECK(
      has(refused(pieces, [](Json& j) { j["model"]["ignore_merges"] = true; }), "model.ignore_merges: expected false"));
  CHECK(has(refused(metaspace, [](Json& j) { j["pre_tokenizer"]["prepend_scheme"] = "last"; }),
            "pre_tokenizer.prepend_scheme: expected \"always\", \"first\" or \"never\", got \"last\""));
  CHECK(has(refused(metaspace, [](Json& j) { j["pre_tokenizer"]["replacement"] = "_"; }),
            "pre_tokenizer.replacement: expected"));
}

TEST_CASE("tokens and merges of a tokenizer.json that do not fit together are refused") {
  auto const pieces = piece_json(llama_pieces), bytes = byte_json(byte_tokens, "llama3");
  using Json = TokenizerJson;
  auto const last = std::to_string(256 + byte_tokens.size() + 2);
  CHECK(has(refused(bytes, [](Json& j) { j["model"]["vocab"]["a"] = 1; }),
            "expected an id from 0 to " + last + " that no other token has, got 1"));
  CHECK(
      has(refused(bytes, [](Json& j) { j["model"]["vocab"]["a"] = 100'000; }), "that no other token has, got 100000"));
  CHECK(
      has(refused(bytes, [](Json& j) { j["model"]["vocab"]["a"] = "x"; }), "model.vocab.a: expected an id from 0 to"));
  CHECK(has(refused(bytes, [](Json& j) { j["model"]["vocab"] = Json::array(); }),
            "model.vocab: expected an object of tokens"));
  CHECK(has(refused(bytes,
                    [](Json& j) {
                      auto vocab = j["model"]["vocab"];
                      auto const id = vocab["a"];
                      vocab.erase("a");
                      vocab["\xe4\xb8\xad"] = id;
                      j["model"]["vocab"] = vocab;
                    }),
            "model.vocab: expected a token for each byte, but 0x61 has none"));
  CHECK(has(refused(bytes, [](Json& j) { j["added_tokens"][0]["new"] = 1; }),
            "added_tokens[0].new: expected no field of this name"));
  CHECK(has(refused(pieces,
                    [](Json& j) {
                      j["added_tokens"][0]["special"] = false;
                      j["added_tokens"][0]["normalized"] = true;
                    }),
            "added_tokens[0].normalized: expected false, got true"));
  CHECK(has(refused(bytes, [](Json& j) { j["added_tokens"][1]["lstrip"] = true; }),
            "added_tokens[1].lstrip: expected false"));
  CHECK(has(refused(bytes, [](Json& j) { j["added_tokens"][1]["id"] = 0; }), "added_tokens[1].id: expected an id"));
  CHECK(has(refused(bytes, [](Json& j) { j["added_tokens"][1]["content"] = ""; }),
            "added_tokens[1].content: expected a text"));
  CHECK(has(refused(pieces, [](Json& j) { j["added_tokens"][1]["id"] = 5; }),
            "added_tokens[1].id: expected 1, as in model.vocab, got 5"));
  CHECK(has(refused(pieces, [](Json& j) { j["added_tokens"].push_back(j["added_tokens"][1]); }),
            "added_tokens[3].content: expected a token that does not occur twice"));
  CHECK(has(refused(bytes, [](Json& j) { j["model"]["merges"] = 3; }), "model.merges: expected an array of pairs"));
  CHECK(has(refused(bytes, [](Json& j) { j["model"]["merges"][2] = "abc"; }),
            "model.merges[2]: expected two tokens with a blank between them, got \"abc\""));
  CHECK(has(refused(bytes, [](Json& j) { j["model"]["merges"][2] = Json::array({"a"}); }),
            "model.merges[2]: expected two tokens"));
  CHECK(has(refused(bytes, [](Json& j) { j["model"]["merges"][2] = "a ~"; }),
            "model.merges[2]: expected two tokens of model.vocab that are a third one together"));
  CHECK(has(refused(bytes, [](Json& j) { j["model"]["merges"].push_back(j["model"]["merges"][0]); }),
            "expected a pair that does not occur twice"));
  CHECK(has(refused(pieces,
                    [](Json& j) {
                      auto vocab = j["model"]["vocab"];
                      auto const id = vocab["<0x41>"];
                      vocab.erase("<0x41>");
                      vocab["<0x4>"] = id;
                      j["model"]["vocab"] = vocab;
                    }),
            "byte_fallback: expected a piece '<0x41>', got none"));
}

TEST_CASE("a tokenizer.json that is cut or damaged is refused, or read, and never breaks the program") {
  auto const whole = byte_json({byte_tokens.begin(), byte_tokens.begin() + 8}, "llama3").dump();
  CHECK(has(what([] { read_tokenizer_json("[1]", "'t.json'"); }),
            "'t.json': expected a JSON object, got '[1]'; the file is cut, damaged, or of another kind"));
  std::string const deep(100'000, '[');
  CHECK(
      has(what([&] { read_tokenizer_json("{\"model\": " + deep, "'t.json'"); }), "expected JSON of at most 64 levels"));
  for (std::size_t size = 0; size < whole.size(); size += 7)
    CHECK(has(what([&] { read_tokenizer_json(std::string_view(whole).substr(0, size), "'t.json'"); }), "'t.json': "));
  std::mt19937 draw(2);
  int read = 0;
  for (int i = 0; i < 1500; ++i) {
    auto bytes = whole;
    for (auto flips = 1 + draw() % 2; flips > 0; --flips)
      bytes[draw() % bytes.size()] ^= static_cast<char>(1u << draw() % 8);
    try {
      auto const tokenizer = read_tokenizer_json(bytes, "'t.json'");
      (void)tokenizer->decode(tokenizer->encode("the 123 \xff<|im_end|>", Marker::token));
      ++read;
    } catch (fsdp::ConfigError const&) {
    }
  }
  CHECK(read > 0);
}
