// SPDX-License-Identifier: Apache-2.0
// JSON that is not JSON is refused by every reader, and lines of it say what is wrong and where.
// skip-tsan
// links: transformer_data
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/json.hpp"
#include "tests/catch.hpp"
#include "tests/support/byte_pair_files.hpp"
#include "tests/support/messages.hpp"
#include "tests/support/temporary_folder.hpp"
#include "transformer/data/dataset.hpp"
#include "transformer/data/json_line.hpp"
#include "transformer/launch/cache_folder.hpp"
#include "transformer/tokenizer/byte_pair.hpp"
#include "transformer/tokenizer/json_field.hpp"

namespace {

using namespace std::string_literals;
using fsdp::checkpoint::JsonFault;
using fsdp::checkpoint::parse_json;
using fsdp::testing::has;
using fsdp::testing::what;
using Folder = fsdp::testing::TemporaryFolder;

/// The error of `document_of_line` for a line, without the name of the file and the number of the line.
std::string refusal_of(std::string const& line) {
  auto const message = what([&] { transformer::document_of_line(line, "x.jsonl", 3); });
  std::string const place = "data: 'x.jsonl', line 3";
  return message.starts_with(place) ? message.substr(place.size()) : message;
}

}  // namespace

TEST_CASE("a line of JSON that is no document is refused with its fault and column") {
  struct Case {
    std::string line, says;
  };
  std::vector<Case> const cases{
      // Bytes behind the value, a NUL among them.
      {"{\"text\": \"a\"}\0{\"text\": \"b\"}"s,
       ", column 14: '\\x00{\"text\": \"b\"}' stands behind the end of the JSON value"},
      {"{\"text\": \"a\"}\0"s, ", column 14: '\\x00' stands behind the end of the JSON value"},
      {"{\"text\": \"a\"} {\"text\": \"b\"}",
       ", column 15: '{\"text\": \"b\"}' stands behind the end of the JSON value"},
      {"{\"text\": \"a\"} 1e999", ", column 15: '1e999' stands behind the end of the JSON value"},
      {"\0"s, ", column 1: the control character U+0000 is not allowed in JSON; a string has it as \\u0000"},
      {"{\"text\": \"a\0b\"}"s,
       ", column 12: the control character U+0000 is not allowed in JSON; a string has it as \\u0000"},
      {"{\"text\": \"a\tb\"}",
       ", column 12: the control character U+0009 is not allowed in JSON; a string has it as \\u0009"},
      // Not UTF-8. Columns are characters.
      {"{\"text\": \"\xc3\xa9\xff\"}", ", column 12: byte 0xff is not UTF-8"},
      {"{\"text\": \"\xc3\xa9\xed\xa0\x80\"}", ", column 12: byte 0xed is not UTF-8"},
      {"{\"text\": \"\xe2\x82", ", column 11: byte 0xe2 is not UTF-8"},
      // Halves of surrogate pairs, whatever follows them.
      {R"({"text": "\ud800"})", ", column 11: the escape \\ud800 is half of a surrogate pair"},
      {R"({"text": "\ud83d\ude00\udbffx"})", ", column 23: the escape \\udbff is half of a surrogate pair"},
      {R"({"text": "\ud800\n"})", ", column 11: the escape \\ud800 is half of a surrogate pair"},
      {R"({"text": "\ud800\u0041"})", ", column 11: the escape \\ud800 is half of a surrogate pair"},
      {R"({"text": "\ud83d\ude00\udc00"})", ", column 23: the escape \\udc00 is half of a surrogate pair"},
      // Values that are not JSON's.
      {R"({"a": NaN, "text": "b"})", ", column 7: NaN is not a value of JSON; expected a number or null"},
      {R"({"a": -Infinity})", ", column 7: -Infinity is not a value of JSON; expected a number or null"},
      {R"({"a": True})", ", column 7: True is not a value of JSON; expected true"},
      {R"({'text': 1})", ", column 2: a string begins with '; expected \""},
      {R"({"a": 1e999})", ", column 7: the number 1e999 is too large"},
      // Broken.
      {R"({"text": "abc)", ", column 14: the line ends before its JSON object does"},
      {"{\"a\": 1.\t2}", ", column 7: expected JSON, got '1.\\x092}'"},
      {"1. e4 e5", ", column 1: expected JSON, got '1. e4 e5'"},
      {R"({"text" "b"})", ", column 9: expected JSON, got '\"b\"}'"},
      {R"({"text": "a",})", ", column 14: expected JSON, got '}'"},
      {R"({"text": "\x"})", ", column 11: '\\x' is not an escape of JSON"},
      {R"({"text": "\u12g4"})", ", column 11: '\\u12g' is not an escape of JSON"},
      {std::string(70, '['), ": arrays and objects are nested more than 64 deep"},
      {R"({"text": "a", "text": "b"})", ": the key \"text\" occurs twice in an object"},
      // JSON, but no document.
      {R"({"prompt": "a", "completion": "b"})",
       ": the object has no key \"text\"; its keys are: \"completion\", \"prompt\""},
      {"{}", ": the object has no key \"text\"; its keys are: none"},
      {R"({"text": 5})", ": the value of \"text\" is of type number, expected a string"},
      {"[]", ": expected a JSON object with a string \"text\", got an array"},
      {"5", ": expected a JSON object with a string \"text\", got a value of type number"},
  };
  for (auto const& bad : cases) {
    INFO(transformer::excerpt(bad.line));
    CHECK(refusal_of(bad.line) == bad.says);
  }
  for (std::string const good :
       {"{\"text\": \"\\ud83d\\ude00\"}", "\xef\xbb\xbf {\"n\": 1, \"text\": \"\xf0\x9f\x98\x80\"} \r"})
    CHECK(transformer::document_of_line(good, "x", 1) == "\xf0\x9f\x98\x80");
  // A line of many keys, or of long ones, gives a message that fits on a screen.
  nlohmann::json many;
  for (int i = 0; i < 1000; ++i) many[std::to_string(i)] = 1;
  CHECK(has(refusal_of(many.dump()), "\"105\", \"106\" and others"));
  CHECK(refusal_of("{\"" + std::string(1'000'000, 'x') + "\": 1}").size() < 200);
  CHECK(refusal_of(std::string(1'000'000, 'x')).size() < 200);
}

TEST_CASE("no reader of JSON takes a NUL for the end of the value") {
  auto const with_nul = [](std::string const& json) { return json + '\0' + json; };
  JsonFault fault;
  CHECK(parse_json("{}\0"s, fault).is_discarded());
  CHECK(fault.kind == JsonFault::Kind::behind);
  CHECK(parse_json(" {} \n", fault) == nlohmann::ordered_json::object());
  CHECK(has(what([&] { fsdp::checkpoint::parse_object("{}\0x"s, "it"); }),
            "it has bytes behind the end of its JSON object, the first at offset 2"));
  CHECK(has(what([&] { transformer::parse_json_object("{}\0x"s, "it"); }),
            "it: expected nothing behind the JSON object, got '\\x00x' at byte 2"));
  Folder const folder;
  CHECK(has(what([&] { transformer::read_meta(folder.file("meta.json", with_nul("{\"vocab_size\": 5}"))); }),
            "expected a JSON object"));
  fsdp::testing::BytePairs const pairs;
  CHECK(has(what([&] {
              transformer::BytePair({with_nul(pairs.encoder_json()), pairs.vocab_bpe()});
            }),
            "expected a JSON object"));
  CHECK(transformer::read_answers(folder.file("answers", "{\"a\": 1}")).size() == 1);
  CHECK(transformer::read_answers(folder.file("answers", with_nul("{\"a\": 1}"))).empty());
}
