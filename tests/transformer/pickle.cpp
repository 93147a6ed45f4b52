// SPDX-License-Identifier: Apache-2.0
// nanoGPT's meta.pkl: what it says is what Python reads, and every other pickle is refused.
// skip-tsan
// links: transformer_data
#include "transformer/data/pickle.hpp"

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "tests/catch.hpp"
#include "tests/support/messages.hpp"
#include "tests/support/pickles.hpp"
#include "tests/support/temporary_folder.hpp"
#include "transformer/data/dataset.hpp"
#include "transformer/data/prepare.hpp"

namespace {

namespace fs = std::filesystem;
using namespace std::string_literals;
using namespace transformer;
using fsdp::testing::has;
using fsdp::testing::meta_pickles;
using fsdp::testing::what;
using Folder = fsdp::testing::TemporaryFolder;

std::string refusal_of(std::string const& bytes) {
  return what([&] { read_pickle(bytes, "'m'"); });
}

/// A string's instruction. @pre text is shorter than 256 bytes
std::string shown(std::string const& text) { return "\x8c" + std::string(1, static_cast<char>(text.size())) + text; }

/// A meta.pkl with these instructions for `vocab_size`, `itos` and `stoi`.
std::string meta(std::string const& size, std::string const& itos, std::string const& stoi) {
  return "\x80\4}(" + shown("vocab_size") + size + shown("itos") + itos + shown("stoi") + stoi + "u.";
}

}  // namespace

TEST_CASE("a meta.pkl of nanoGPT says vocabulary and characters, in each protocol") {
  for (auto const& bytes : meta_pickles()) {
    Folder const folder;
    auto const read = read_pickled_meta(folder.file("meta.pkl", bytes));
    CHECK(read.vocab_size == 3);
    CHECK(read.token_bytes == 2);
    REQUIRE(read.characters != nullptr);
    CHECK(open_tokenizer(read)->decode(std::vector<std::int64_t>{1, 0, 2}) == "a\n\xc3\xa9");
    CHECK(open_tokenizer(read)->encode("\xc3\xa9") == std::vector<std::int64_t>{2});
    // The meta.json that a model's folder gets says the same.
    auto const converted = read_meta(folder.file("meta.json", read.json));
    CHECK(converted.vocab_size == 3);
    CHECK(open_tokenizer(converted)->encode("a\n") == std::vector<std::int64_t>{1, 0});
  }
}

TEST_CASE("numbers of a pickle have Python's values") {
  auto const value = [](std::string const& instruction) {
    auto const bytes = "}" + shown("a") + instruction + "s.";
    return read_pickle(bytes, "'m'").find("a")->number;
  };
  CHECK(value("K\xff") == 255);
  CHECK(value("M\xff\xff") == 65535);
  CHECK(value("J\xfe\xff\xff\xff") == -2);
  CHECK(value("\x8a\0"s) == 0);
  CHECK(value("\x8a\1\xff") == -1);
  CHECK(value("\x8a\2\xff\0"s) == 255);
  CHECK(value("\x8a\x8\0\0\0\0\0\0\0\x80"s) == INT64_MIN);
}

TEST_CASE("every other pickle is refused, with the byte and what is wrong") {
  struct Case {
    std::string bytes, says;
  };
  std::vector<Case> const cases{
      {"", "byte 0: the pickle is truncated"},
      {"K\1.", "byte 2: the pickle ends without a single dictionary"},
      {"}}.", "without a single dictionary"},
      {"}(.", "without a single dictionary"},
      {"}.}", "byte 2: bytes follow the end"},
      {"\x80\6}.", "the protocol is newer than 5"},
      {"cposix\nsystem\n", "byte 0: instruction 0x63 builds another value or calls a function"},
      {"}" + shown("a") + "]s.", "byte 4: instruction 0x5d"},
      {"}" + shown("a") + "G\0\0\0\0\0\0\0\0s."s, "instruction 0x47"},
      {"}" + shown("\xff") + "K\1s.", "a string is not UTF-8"},
      {"}X\xff\xff\xff\xff", "byte 1: the pickle is truncated"},
      {"}\x8d\xff\xff\xff\xff\xff\xff\xff\xff", "byte 1: the pickle is truncated"},
      {"}\x8a\x9\0\0\0\0\0\0\0\0\1"s, "a number has more than 64 bits"},
      {"}K\1s.", "a key and a value do not follow a dictionary"},
      {"K\1K\1K\1s.", "keys and values do not follow a dictionary"},
      {"}K\1u.", "there is no mark"},
      {"}(K\1u.", "keys and values do not follow a dictionary"},
      {"(K\1K\1u.", "keys and values do not follow a dictionary"},
      {"}(}K\1u.", "a key is a dictionary"},
      {"}h\0."s, "a value is named that was not remembered"},
      {"}q\0"s + shown("a") + "h\0s."s, "a dictionary occurs twice"},
      {"q\0"s, "there is no value to remember"},
      {"}" + shown("a") + "K\1s" + shown("a") + "K\2s.", "the key 'a' occurs twice in a dictionary"},
      {"}K\1K\1sK\1K\2s.", "the key 1 occurs twice in a dictionary"},
  };
  for (auto const& bad : cases) {
    auto const message = refusal_of(bad.bytes);
    INFO(message);
    CHECK(has(message, bad.says));
    CHECK(message.starts_with("'m'"));
  }
  // Cut anywhere, or nested without end.
  for (auto const& good : meta_pickles())
    for (std::size_t size = 0; size < good.size(); ++size) CHECK(has(refusal_of(good.substr(0, size)), "'m', byte "));
  std::string deep;
  for (int i = 0; i < 200'000; ++i) deep += "}K\1";
  CHECK(has(refusal_of(deep + "}" + std::string(200'000, 's') + "."), "dictionaries are nested too deep"));
}

TEST_CASE("a meta.pkl that says nonsense is refused") {
  Folder const folder;
  auto const refused = [&](std::string const& bytes) {
    return what([&] { read_pickled_meta(folder.file("meta.pkl", bytes)); });
  };
  auto const two = "}(K\0"s + shown("a") + "K\1" + shown("b") + "u",
             back = "}(" + shown("a") + "K\0"s + shown("b") + "K\1u";
  CHECK(refused(meta("K\2", two, back)) == "nothing was thrown");
  CHECK(refused("}" + shown("vocab_size") + "K\5s.") == "nothing was thrown");  // nanoGPT trains with this
  CHECK(has(refused("}."), "vocab_size: expected a whole number from 1 to 100000000"));
  CHECK(has(refused(meta("K\0"s, two, back)), "vocab_size: expected"));
  CHECK(has(refused(meta(shown("2"), two, back)), "vocab_size: expected"));
  CHECK(has(refused(meta("K\3", two, back)), "itos: expected a dictionary with 3 entries (vocab_size)"));
  CHECK(has(refused(meta("K\2", "K\1", back)), "itos: expected a dictionary"));
  CHECK(has(refused(meta("K\2", back, back)), "itos: expected ids from 0 to 1 and their strings"));
  CHECK(has(refused(meta("K\2", "}(K\1"s + shown("a") + "K\2" + shown("b") + "u", back)),
            "itos: expected ids from 0 to 1"));
  CHECK(
      has(refused(meta("K\2", "}(K\0"s + shown("a") + "K\1" + shown("a") + "u", back)), "the symbol 'a' occurs twice"));
  CHECK(has(refused(meta("K\2", two, two)), "stoi: expected the inverse of itos"));
  CHECK(has(refused(meta("K\2", two, "}(" + shown("b") + "K\0"s + shown("a") + "K\1u")), "stoi: expected the inverse"));
  CHECK(has(refused("no pickle"), "byte 0: instruction 0x6e"));
  CHECK(has(what([&] { read_pickled_meta(folder.path / "none"); }), "cannot be opened"));
}

TEST_CASE("a data set has one file that says what its tokens are, and prepare leaves none of other tokens") {
  Folder const folder;
  PrepareOptions options;
  options.folder = folder.path / "d";
  options.data = folder.file("t.txt", "abc b a abc b a abc b a");
  prepare_data(options);
  auto const open = [&] { return open_dataset({"", (options.folder / "train.bin").string(), ""}); };
  auto const pickle = folder.file("d/meta.pkl", meta_pickles()[2]);
  CHECK(has(what(open), "d' has a meta.json and a meta.pkl: expected one of them"));
  fs::remove(options.folder / "meta.json");
  CHECK(open().meta.vocab_size == 3);
  CHECK(open().meta.path == pickle);
  prepare_data(options);
  CHECK_FALSE(fs::exists(pickle));
  CHECK(open().meta.vocab_size == 4);
}
