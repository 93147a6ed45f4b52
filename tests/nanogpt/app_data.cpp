// SPDX-License-Identifier: Apache-2.0
// nanogpt's data: preparing a text, reading token files.
// skip-tsan
#include "data.cpp"  // NOLINT: tests what the program is made of

#include <cstdlib>
#include <string>
#include <vector>

#include "tests/catch.hpp"
#include "tests/support/messages.hpp"
#include "tests/support/temporary_folder.hpp"

namespace {

using namespace nanogpt;
namespace fs = std::filesystem;
using fsdp::testing::has;
using fsdp::testing::what;
using Folder = fsdp::testing::TemporaryFolder;

}  // namespace

TEST_CASE("a prepared text is split 90/10 by characters and decodes to itself") {
  Folder const folder;
  std::string const text =
      "h\xc3\xa9llo w\xc3\xb6rld \xe2\x82\xac \xf0\x9f\x98\x80\nabc";  // 2-, 3- and 4-byte characters
  auto const prepared = prepare_text(folder.file("text", text), folder.path / "out");
  CHECK(prepared.characters == 19);
  CHECK(prepared.train_tokens == 17);  // floor(0.9 * 19)
  CHECK(prepared.val_tokens == 2);

  auto const meta = read_meta(folder.path / "out" / "meta.json");
  CHECK(meta.vocab_size == prepared.vocab_size);
  CHECK(meta.token_bytes == 2);
  TokenFile const train(folder.path / "out" / "train.bin", 2), val(folder.path / "out" / "val.bin", 2);
  CHECK(fs::file_size(folder.path / "out" / "train.bin") == 34);
  std::vector<std::int64_t> ids;
  for (std::int64_t i = 0; i < train.size(); ++i) ids.push_back(train.at(i));
  for (std::int64_t i = 0; i < val.size(); ++i) ids.push_back(val.at(i));
  CHECK(meta.vocabulary.decode(ids) == text);
  CHECK(meta.vocabulary.encode(text) == ids);
}

TEST_CASE("symbols are numbered by code point and meta.json says so both ways") {
  Folder const folder;
  prepare_text(folder.file("text", "ba\nc\"a\\"), folder.path);
  std::ifstream stream(folder.path / "meta.json");
  auto const json = nlohmann::json::parse(stream);
  CHECK(json["itos"] == nlohmann::json({"\n", "\"", "\\", "a", "b", "c"}));
  CHECK(json["stoi"]["a"] == 3);
  CHECK(json["vocab_size"] == 6);
  CHECK(json["dtype"] == "uint16");
}

TEST_CASE("more than 65,535 symbols take uint32 and meta.json says so") {
  Folder const folder;
  std::string text;
  for (char32_t code = 0; code < 70000; ++code)
    if (code < 0xd800 || code > 0xdfff) text += encode_utf8(code);
  auto const prepared = prepare_text(folder.file("text", text), folder.path);
  CHECK(prepared.vocab_size == 70000 - 2048);
  auto const meta = read_meta(folder.path / "meta.json");
  CHECK(meta.token_bytes == 4);
  TokenFile const val(folder.path / "val.bin", 4);
  CHECK(val.at(val.size() - 1) == prepared.vocab_size - 1);
}

TEST_CASE("bytes that are not UTF-8 are refused with their offset") {
  struct Case {
    char const* name;
    std::string text;
    std::string offset;
  };
  std::vector<Case> const cases{
      {"stray continuation",
       "ab\x80"
       "c",
       "byte 2"},
      {"cut off", "abc\xe2\x82", "byte 3"},
      {"overlong", "\xc0\x80", "byte 0"},
      {"overlong in three", "a\xe0\x80\x80", "byte 1"},
      {"surrogate", "a\xed\xa0\x80", "byte 1"},
      {"beyond U+10FFFF", "\xf4\x90\x80\x80", "byte 0"},
      {"0xff", "ok\xff", "byte 2"},
      {"wrong continuation",
       "x\xc3"
       "a",
       "byte 1"},
  };
  for (auto const& bad : cases) {
    INFO(bad.name);
    Folder const folder;
    auto const message = what([&] { prepare_text(folder.file("text", bad.text), folder.path / "out"); });
    CHECK(has(message, bad.offset + " "));
    CHECK_FALSE(fs::exists(folder.path / "out" / "train.bin"));
  }
}

TEST_CASE("token files that are missing, empty, truncated or out of the vocabulary are refused") {
  Folder const folder;
  CHECK(has(what([&] { TokenFile(folder.path / "none.bin", 2); }), "missing"));
  CHECK(has(what([&] { TokenFile(folder.file("empty.bin", ""), 2); }), "empty"));
  CHECK(has(what([&] { TokenFile(folder.file("odd.bin", "abc"), 2); }), "3 bytes"));
  CHECK(has(what([&] { prepare_text(folder.file("nothing", ""), folder.path); }), "empty"));
  CHECK(has(what([&] { TokenFile(folder.path, 2); }), "directory"));
  TokenFile const tokens(folder.file("ids.bin", std::string("\x01\x00\x41\x00\x02\x00", 6)), 2);
  CHECK_NOTHROW(tokens.check_ids(66, 0, 3));
  auto const message = what([&] { tokens.check_ids(65, 0, 3); });
  CHECK(has(message, "token 65 at position 1"));
  CHECK(has(message, "vocabulary of 65"));
  CHECK_NOTHROW(tokens.check_ids(65, 2, 3));
}

TEST_CASE("meta.json must make sense; without it the vocabulary is GPT-2's, padded") {
  Folder const folder;
  CHECK(read_meta(folder.path / "none").vocab_size == 50304);
  for (std::string const text :
       {"", "[]", "{\"vocab_size\": \"65\"}", "{\"vocab_size\": 0}", "{\"vocab_size\": 2, \"itos\": [\"a\"]}",
        "{\"vocab_size\": 2, \"itos\": [\"a\", \"a\"]}", "{\"vocab_size\": 2, \"dtype\": \"int8\"}",
        "{\"vocab_size\": 2, \"itos\": [1, 2]}"}) {
    INFO(text);
    CHECK(has(what([&] { read_meta(folder.file("meta.json", text)); }), "meta.json"));
  }
  CHECK(read_meta(folder.file("meta.json", "{\"vocab_size\": 300}")).vocab_size == 300);
}

TEST_CASE("targets are inputs one token later, to the last token of the file") {
  Folder const folder;
  std::string bytes;
  for (int i = 0; i < 12; ++i) bytes += {static_cast<char>(i), '\0'};
  TokenFile const tokens(folder.file("ids.bin", bytes), 2);
  std::vector<std::int32_t> x(4), y(4);
  for (std::int64_t const start : {0, 5, 7}) {
    fill_sequence(tokens, start, x, y);
    for (std::size_t i = 0; i < x.size(); ++i) {
      CHECK(x[i] == static_cast<std::int32_t>(start) + static_cast<std::int32_t>(i));
      CHECK(y[i] == x[i] + 1);
    }
  }
  for (std::int64_t const start : {-1, 8}) {
    CHECK(has(what([&] { fill_sequence(tokens, start, x, y); }), "12 tokens, too few for a block of 4"));
  }
}

TEST_CASE("tinyshakespeare has 65 symbols and 1,003,854 and 111,540 tokens") {
  char const* const data = std::getenv("FSDP_TEST_DATA");
  if (data == nullptr) {
    WARN("skipped: FSDP_TEST_DATA is not set");
    return;
  }
  Folder const folder;
  auto const prepared = prepare_text(fs::path(data) / "tinyshakespeare.txt", folder.path);
  CHECK(prepared.characters == 1115394);
  CHECK(prepared.vocab_size == 65);
  CHECK(prepared.train_tokens == 1003854);
  CHECK(prepared.val_tokens == 111540);
}
