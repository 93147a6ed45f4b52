// SPDX-License-Identifier: Apache-2.0
// Files beside tokenizer.json and tokenizer.model: the tokens around each text, added tokens, and what is refused. The
// expected ids are those of transformers 4.57 and 5.24, and of 4.57 where the two differ.
// skip-tsan
//
// links: transformer_data
#include "transformer/tokenizer/tokenizer_config.hpp"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/catch.hpp"
#include "tests/support/messages.hpp"
#include "tests/support/temporary_folder.hpp"
#include "tests/support/tokenizer_files.hpp"
#include "tests/transformer/tokenizer_cases.hpp"
#include "transformer/tokenizer/marked_texts.hpp"
#include "transformer/tokenizer/tokenizer_folder.hpp"

namespace {

using namespace transformer;
using fsdp::testing::byte_json;
using fsdp::testing::byte_tokens;
using fsdp::testing::has;
using fsdp::testing::llama_pieces;
using fsdp::testing::piece_json;
using fsdp::testing::PieceFile;
using fsdp::testing::TemporaryFolder;
using fsdp::testing::TokenizerJson;
using fsdp::testing::what;
using Ids = std::vector<std::int64_t>;

/// The first id that piece_json(llama_pieces) leaves free.
auto const next_id = static_cast<std::int64_t>(fsdp::testing::piece_rows(llama_pieces).size());

/// A template: these ids, a text, those.
TokenizerJson template_of(Ids const& before, Ids const& after) {
  TokenizerJson single = TokenizerJson::array(), tokens = TokenizerJson::object();
  auto const add = [&](std::int64_t id) {
    auto const name = std::to_string(id);
    single.push_back({{"SpecialToken", {{"id", name}, {"type_id", 0}}}});
    tokens[name] = {{"id", name}, {"ids", TokenizerJson::array({id})}, {"tokens", TokenizerJson::array({name})}};
  };
  for (auto const id : before) add(id);
  single.push_back({{"Sequence", {{"id", "A"}, {"type_id", 0}}}});
  for (auto const id : after) add(id);
  return {{"type", "TemplateProcessing"}, {"single", single}, {"pair", single}, {"special_tokens", tokens}};
}

/// A folder with a tokenizer.
struct Files {
  TemporaryFolder folder;

  void write(std::string const& name, TokenizerJson const& json) { folder.file(name, json.dump()); }
  void write_model() {
    folder.file("tokenizer.model", PieceFile{.rows = fsdp::testing::piece_rows(llama_pieces)}.bytes());
  }
  std::unique_ptr<Tokenizer> open() { return open_tokenizer_folder(folder.path, 1000); }
  std::string refused() {
    return what([&] { open(); });
  }
};

TokenizerJson token(std::string const& text, bool special) {
  return {{"content", text}, {"special", special},   {"lstrip", false},
          {"rstrip", false}, {"single_word", false}, {"normalized", false}};
}

}  // namespace

TEST_CASE("the template of a tokenizer.json says what stands around each text", "[tokenizer]") {
  auto json = piece_json(llama_pieces);
  auto const check = [&](TokenizerJson const& post_processor, TextTemplate const& expected) {
    Files files;
    json["post_processor"] = post_processor;
    files.write("tokenizer.json", json);
    CHECK(files.open()->text_template() == expected);
  };
  check(nullptr, {});
  check(template_of({1}, {}), {{1}, {}});
  check(template_of({1}, {2}), {{1}, {2}});
  check(template_of({1, 1}, {}), {{1, 1}, {}});
  check(template_of({}, {2, 0}), {{}, {2, 0}});
  check({{"type", "Sequence"},
         {"processors", TokenizerJson::array({{{"type", "ByteLevel"}}, template_of({1}, {2}), template_of({0}, {0})})}},
        {{0, 1}, {2, 0}});
  auto broken = template_of({1}, {});
  broken["special_tokens"].erase("1");
  Files files;
  auto const refused = [&](TokenizerJson const& post_processor) {
    json["post_processor"] = post_processor;
    files.write("tokenizer.json", json);
    return files.refused();
  };
  CHECK(has(refused(broken), "post_processor.single[0].SpecialToken.id: expected a name in special_tokens"));
  broken["special_tokens"]["1"] = {{"ids", TokenizerJson::array({5000})}};
  CHECK(has(refused(broken), "post_processor.special_tokens.1.ids[0]: expected the id of a token, got 5000"));
  broken["single"] = TokenizerJson::array();
  CHECK(has(refused(broken), "post_processor.single: expected one Sequence \"A\", and SpecialTokens"));
}

TEST_CASE("tokenizer_config.json decides what stands around a text for the classes that heed it", "[tokenizer]") {
  TokenizerJson const names{{"bos_token", "<s>"}, {"eos_token", {{"content", "</s>"}}}};
  struct Row {
    std::string type;
    TokenizerJson flags;
    TextTemplate of_one_bos, of_eos, of_model;  ///< templates <s> A and <s> A </s>; tokenizer.model
  };
  std::vector<Row> const rows{
      {"LlamaTokenizer", {{"add_eos_token", true}}, {{1}, {2}}, {{1}, {2}}, {{1}, {2}}},
      {"LlamaTokenizer", {{"add_bos_token", false}}, {{}, {}}, {{}, {2}}, {{}, {}}},
      {"LlamaTokenizerFast", {{"add_eos_token", false}}, {{1}, {}}, {{1}, {}}, {{1}, {}}},
      {"CodeLlamaTokenizer", {{"add_bos_token", false}, {"add_eos_token", true}}, {{}, {2}}, {{}, {2}}, {{}, {2}}},
      {"LlamaTokenizer", TokenizerJson::object(), {{1}, {}}, {{1}, {2}}, {{1}, {}}},
      {"", {{"add_bos_token", true}, {"add_eos_token", true}}, {{1}, {2}}, {{1}, {2}}, {{1}, {2}}},
      {"PreTrainedTokenizerFast", {{"add_bos_token", false}, {"add_eos_token", true}}, {{1}, {}}, {{1}, {2}}, {}},
      {"GPT2Tokenizer", {{"add_bos_token", false}}, {{1}, {}}, {{1}, {2}}, {}}};
  for (auto const& row : rows) {
    CAPTURE(row.type, row.flags.dump());
    auto config = names;
    config.update(row.flags);
    if (!row.type.empty()) config["tokenizer_class"] = row.type;
    Files files;
    files.write("tokenizer_config.json", config);
    auto json = piece_json(llama_pieces);
    json["post_processor"] = template_of({1}, {});
    files.write("tokenizer.json", json);
    CHECK(files.open()->text_template() == row.of_one_bos);
    json["post_processor"] = template_of({1}, {2});
    files.write("tokenizer.json", json);
    CHECK(files.open()->text_template() == row.of_eos);
    std::filesystem::remove(files.folder.path / "tokenizer.json");
    files.write_model();
    if (row.of_model == TextTemplate{} && row.type != "LlamaTokenizer")
      CHECK(has(files.refused(), "tokenizer_class: expected a class of Llama or CodeLlama, for there is no"));
    else
      CHECK(files.open()->text_template() == row.of_model);
  }
}

TEST_CASE("the tokens that begin and end texts are those that the files name", "[tokenizer]") {
  auto const first = static_cast<std::int64_t>(256 + byte_tokens.size());
  auto const check = [&](TokenizerJson const& config, TokenizerJson const& map, Ids const& begin,
                         std::optional<std::int64_t> end) {
    Files files;
    auto json = byte_json(byte_tokens, "llama3");
    json["post_processor"] = template_of({first + 1}, {});
    files.write("tokenizer.json", json);
    if (!config.is_null()) files.write("tokenizer_config.json", config);
    if (!map.is_null()) files.write("special_tokens_map.json", map);
    CHECK(files.open()->text_template().before == begin);
    CHECK(files.open()->end_of_text() == end);
  };
  check(nullptr, nullptr, {first + 1}, first);
  check({{"add_bos_token", false}}, nullptr, {}, first);
  check({{"bos_token", nullptr}, {"add_bos_token", true}}, nullptr, {first + 1}, first);
  check({{"bos_token", "<|endoftext|>"}, {"eos_token", {{"content", "<|im_end|>"}}}}, nullptr, {first + 1}, first + 2);
  check({{"bos_token", "<|im_end|>"}, {"add_bos_token", true}}, nullptr, {first + 2}, first);
  check(nullptr, {{"eos_token", "<|im_end|>"}}, {first + 1}, first + 2);
  // transformers does not read special_tokens_map.json beside added_tokens_decoder.
  check({{"added_tokens_decoder", TokenizerJson::object()}}, {{"eos_token", "<|im_end|>"}}, {first + 1}, first);
}

TEST_CASE("tokens that other files add are found in texts, and have the ids of those files", "[tokenizer]") {
  TokenizerJson const ids{{"<|im_start|>", next_id}, {"<|im_end|>", next_id + 1}};
  TokenizerJson decoder;
  for (bool const special : {true, false}) {
    decoder[std::to_string(next_id)] = token("<|im_start|>", special);
    decoder[std::to_string(next_id + 1)] = token("<|im_end|>", true);
    decoder["1"] = token("<s>", true);
    for (bool const with_json : {true, false}) {
      for (bool const by_decoder : {true, false}) {
        CAPTURE(special, with_json, by_decoder);
        Files files;
        if (with_json)
          files.write("tokenizer.json", piece_json(llama_pieces));
        else
          files.write_model();
        auto const plain = files.open();
        if (by_decoder) {
          files.write("tokenizer_config.json", {{"added_tokens_decoder", decoder}});
          files.write("added_tokens.json", {{"ignored", 3}});  // as transformers does
        } else {
          files.write("added_tokens.json", ids);
          auto named = TokenizerJson::array({"<|im_end|>"});
          if (special) named.push_back(token("<|im_start|>", true));
          files.write("special_tokens_map.json", {{"additional_special_tokens", named}});
        }
        auto const tokenizer = files.open();
        CHECK(tokenizer->size() == next_id + 2);
        auto expected = plain->encode("the game");
        expected.insert(expected.begin(), next_id);
        expected.push_back(next_id + 1);
        CHECK(tokenizer->encode("<|im_start|>the game<|im_end|>", Marker::token) == expected);
        CHECK(tokenizer->encode("the game") == plain->encode("the game"));
        // SentencePiece's tokenizers write no text for special tokens.
        CHECK(tokenizer->decode(Ids{next_id, next_id + 1}) == (special ? "" : "<|im_start|>"));
        CHECK(tokenizer_files(files.folder.path).size() == 3);
      }
    }
  }
}

TEST_CASE("a legacy tokenizer.model puts a blank before the text behind a marker, another does not", "[tokenizer]") {
  for (bool const legacy : {true, false}) {
    Files files;
    files.write_model();
    files.write("tokenizer_config.json", {{"legacy", legacy}});
    auto const tokenizer = files.open();
    auto const ids = tokenizer->encode("<s>the", Marker::token);
    CHECK((ids == Ids{1, tokenizer->encode("the").front()}) == legacy);
  }
}

TEST_CASE("tokenizer.json may have sections on truncation and padding, and an empty normalizer", "[tokenizer]") {
  Files files;
  auto json = byte_json(byte_tokens, "llama3");
  files.write("tokenizer.json", json);
  auto const plain = files.open()->encode("the game");
  json["truncation"] = {{"direction", "Right"}, {"max_length", 3}, {"strategy", "LongestFirst"}, {"stride", 0}};
  json["padding"] = {{"strategy", "BatchLongest"}, {"direction", "Left"}, {"pad_id", 0}, {"pad_token", "!"}};
  json["normalizer"] = {{"type", "Sequence"}, {"normalizers", TokenizerJson::array()}};
  files.write("tokenizer.json", json);
  CHECK(files.open()->encode("the game") == plain);
}

TEST_CASE("each key of the files beside a tokenizer is read, without effect, or named in a refusal", "[tokenizer]") {
  Files files;
  auto const refused = [&](TokenizerJson const& config) {
    files.write("tokenizer_config.json", config);
    return files.refused();
  };
  auto const both = [&](TokenizerJson const& config) {
    std::filesystem::remove(files.folder.path / "tokenizer.model");
    files.write("tokenizer.json", piece_json(llama_pieces));
    auto const of_json = refused(config);
    std::filesystem::remove(files.folder.path / "tokenizer.json");
    files.write_model();
    return std::pair(of_json, refused(config));
  };
  auto const check = [&](TokenizerJson const& config, std::string const& expected) {
    CAPTURE(config.dump());
    auto const [of_json, of_model] = both(config);
    CHECK(has(of_json, expected));
    CHECK(has(of_model, expected));
  };
  auto const place = "tokenizer_config.json': ";
  check({{"model_max_length", 1e30},
         {"chat_template", "{{ x }}"},
         {"clean_up_tokenization_spaces", false},
         {"padding_side", "left"},
         {"sp_model_kwargs", TokenizerJson::object()},
         {"pad_token", nullptr},
         {"unk_token", "<unk>"},
         {"fill_token", "<FILL_ME>"},
         {"use_default_system_prompt", false},
         {"a_key_to_come", nullptr}},
        "nothing was thrown");
  check({{"a_key_to_come", 1}}, place + std::string("a_key_to_come: expected supported keys only"));
  check({{"tokenizer_class", "T5Tokenizer"}}, place + std::string("tokenizer_class: expected a class of Llama"));
  check({{"split_special_tokens", true}}, place + std::string("split_special_tokens: expected false, got true"));
  check({{"auto_map", {{"AutoTokenizer", "t.T"}}}}, place + std::string("auto_map: expected none"));
  check({{"add_prefix_space", false}}, place + std::string("add_prefix_space: expected true, as '"));
  check({{"eos_token", 3}}, place + std::string("eos_token: expected a string, got 3"));
  check({{"eos_token", "<eos>"}}, place + std::string("eos_token: expected a token of '"));
  check({{"pad_token", "[PAD]"}}, "or one whose id added_tokens_decoder or added_tokens.json has, got '[PAD]'");
  check({{"additional_special_tokens", TokenizerJson::array({"<|x|>"})}},
        "additional_special_tokens[0]: expected a token of '");
  check({{"added_tokens_decoder", {{"one", token("<|x|>", true)}}}}, "expected an id as its name");
  check({{"added_tokens_decoder", {{"5000", token("<|x|>", true)}}}}, "got 5000");
  check({{"added_tokens_decoder", {{"7", token("<s>", true)}}}}, "got 7");
  auto stripping = token("<|x|>", true);
  stripping["lstrip"] = true;
  check({{"added_tokens_decoder", {{std::to_string(next_id), stripping}}}}, "lstrip: expected false, got true");

  std::filesystem::remove(files.folder.path / "tokenizer_config.json");
  files.write("added_tokens.json", {{"<|x|>", "no id"}});
  CHECK(has(files.refused(), "added_tokens.json': <|x|>: expected an id, got \"no id\""));
  files.write("added_tokens.json", TokenizerJson::object());
  files.write("special_tokens_map.json", {{"a_key_to_come", "x"}});
  CHECK(has(files.refused(), "special_tokens_map.json': a_key_to_come: expected supported keys only"));
}

TEST_CASE("texts with markers have the same ids in parts, and no cut goes through a marker", "[tokenizer]") {
  Files files;
  auto json = piece_json(llama_pieces, "first");
  files.write("added_tokens.json", {{"<|im_start|>", next_id}, {"<|im_start|>s", next_id + 1}, {"xz", next_id + 2}});
  std::vector<std::string> const words{
      "<|im_start|>", "<|im_start|>s",   "xz", "<s>", "</s>", "<|im_", "<", " the", "game", "  ", "x", "z", "\n",
      "<<s>",         "\xf0\x9f\x98\x80"};
  for (int kind = 0; kind < 3; ++kind) {
    if (kind == 0) files.write("tokenizer.json", json);
    if (kind == 1) files.write("tokenizer.json", piece_json(llama_pieces));
    if (kind == 2) std::filesystem::remove(files.folder.path / "tokenizer.json"), files.write_model();
    std::shared_ptr<Tokenizer const> const plain = files.open();
    MarkedTexts const tokenizer(plain);
    CHECK(tokenizer.size() == plain->size());
    std::mt19937 draw(static_cast<unsigned>(kind));
    int cuts = 0;
    for (int round = 0; round < 300; ++round) {
      std::string text;
      for (auto count = draw() % 40; count > 0; --count) text += words[draw() % words.size()];
      auto const whole = plain->encode(text, Marker::token);
      Ids parts;
      WordCache cache(16);
      tokenizer.append(text, parts, cache);
      if (parts != whole) FAIL(kind << ": " << text);
      parts.clear();
      std::string_view rest = text;
      bool first = true;
      for (auto length = std::size_t{0}; length < rest.size(); ++length) {
        auto const cut = tokenizer.last_cut(rest.substr(0, length));
        if (cut == 0) continue;
        if (first) tokenizer.append(rest.substr(0, cut), parts, cache);
        if (!first) tokenizer.append_rest(rest.substr(0, cut), parts, cache);
        rest.remove_prefix(cut);
        length = 0;
        first = false;
        ++cuts;
      }
      if (first) tokenizer.append(rest, parts, cache);
      if (!first) tokenizer.append_rest(rest, parts, cache);
      if (parts != whole) FAIL(kind << ", in parts: " << text);
    }
    CHECK(cuts > 500);
  }
}
