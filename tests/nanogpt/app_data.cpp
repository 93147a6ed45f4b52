// SPDX-License-Identifier: Apache-2.0
// nanogpt's data: token files with and without headers, meta.json, sequences.
// skip-tsan
// links: transformer_data
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tests/catch.hpp"
#include "tests/support/byte_pair_files.hpp"
#include "tests/support/messages.hpp"
#include "tests/support/temporary_folder.hpp"
#include "transformer/data/dataset.hpp"
#include "transformer/data/token_checks.hpp"

namespace {

using namespace transformer;
namespace fs = std::filesystem;
using fsdp::testing::has;
using fsdp::testing::what;
using Folder = fsdp::testing::TemporaryFolder;

/// Bytes of whole numbers, lowest first.
template <class Number>
std::string packed(std::vector<Number> const& numbers) {
  return {reinterpret_cast<char const*>(numbers.data()), numbers.size() * sizeof(Number)};
}

/// llm.c's header.
std::string header(std::int32_t magic, std::int32_t version, std::int32_t tokens) {
  std::vector<std::int32_t> words(256);
  words[0] = magic;
  words[1] = version;
  words[2] = tokens;
  return packed(words);
}

}  // namespace

TEST_CASE("token files that are missing, empty, truncated or out of the vocabulary are refused") {
  Folder const folder;
  CHECK(has(what([&] { TokenFile(folder.path / "none.bin", 2); }), "missing"));
  CHECK(has(what([&] { TokenFile(folder.file("empty.bin", ""), 2); }), "empty"));
  CHECK(has(what([&] { TokenFile(folder.file("odd.bin", "abc"), 2); }), "3 bytes"));
  CHECK(has(what([&] { TokenFile(folder.path, 2); }), "directory"));
  TokenFile const tokens(folder.file("ids.bin", std::string("\x01\x00\x41\x00\x02\x00", 6)), 2);
  CHECK_NOTHROW(tokens.check_ids(66, 0, 3));
  auto const message = what([&] { tokens.check_ids(65, 0, 3); });
  CHECK(has(message, "token 65 at position 1"));
  CHECK(has(message, "vocabulary of 65"));
  CHECK_NOTHROW(tokens.check_ids(65, 2, 3));
}

TEST_CASE("llm.c's files are read by their headers, whatever meta.json says of the tokens") {
  Folder const folder;
  auto const narrow = header(20240520, 1, 3) + packed<std::uint16_t>({50256, 7, 65535});
  auto const wide = header(20240801, 7, 2) + packed<std::uint32_t>({128255, 9});
  for (std::size_t const token_bytes : {2u, 4u}) {
    TokenFile const gpt2(folder.file("gpt2.bin", narrow), token_bytes);
    REQUIRE(gpt2.size() == 3);
    CHECK((gpt2.at(0) == 50256 && gpt2.at(1) == 7 && gpt2.at(2) == 65535));
    CHECK(has(what([&] { gpt2.check_ids(50257, 0, 3); }), "token 65535 at position 2"));
    TokenFile const llama(folder.file("llama.bin", wide), token_bytes);
    REQUIRE(llama.size() == 2);
    CHECK((llama.at(0) == 128255 && llama.at(1) == 9));
    CHECK(has(what([&] { llama.check_ids(128255, 0, 2); }), "token 128255 at position 0"));
  }
}

TEST_CASE("headers of another version, and files that are not as long as their header says, are refused") {
  Folder const folder;
  auto const tokens = packed<std::uint16_t>({1, 2, 3});
  auto const refused = [&](std::string const& bytes) {
    return what([&] { TokenFile(folder.file("x.bin", bytes), 2); });
  };
  CHECK(has(refused(header(20240520, 2, 3) + tokens), "header 20240520 in version 2, expected version 1"));
  CHECK(has(refused(header(20240801, 1, 3) + tokens), "header 20240801 in version 1, expected version 7"));
  CHECK(has(refused(header(20240520, 1, 4) + tokens), "says 4 tokens of 2 bytes, but 6 bytes follow"));
  CHECK(has(refused(header(20240520, 1, 2) + tokens), "says 2 tokens of 2 bytes, but 6 bytes follow"));
  CHECK(has(refused(header(20240801, 7, 3) + tokens), "says 3 tokens of 4 bytes, but 6 bytes follow"));
  CHECK(has(refused(header(20240520, 1, 0)), "says 0 tokens"));
  CHECK(has(refused(header(20240520, 1, -1) + tokens), "says -1 tokens"));
  for (std::size_t const kept : {4u, 6u, 12u, 1023u})
    CHECK(has(refused(header(20240520, 1, 3).substr(0, kept)), "whose header has 1024 bytes; the file has only"));
  CHECK(refused(header(20240521, 1, 3) + tokens) == "nothing was thrown");  // no header: these are tokens
}

TEST_CASE("meta.json must make sense; without it the vocabulary is GPT-2's, padded") {
  Folder const folder;
  CHECK(read_meta(folder.path / "none").vocab_size == 50304);
  for (std::string const text :
       {"", "[]", "{\"vocab_size\": \"65\"}", "{\"vocab_size\": 0}", "{\"vocab_size\": 2, \"itos\": [\"a\"]}",
        "{\"vocab_size\": 2, \"itos\": [\"a\", \"a\"]}", "{\"vocab_size\": 2, \"dtype\": \"int8\"}",
        "{\"vocab_size\": 2, \"itos\": [1, 2]}", "{\"vocab_size\": 2, \"tokenizer\": \"bpe\"}",
        "{\"vocab_size\": 2, \"tokenizer\": \"gpt2\"}"}) {
    INFO(text);
    CHECK(has(what([&] { read_meta(folder.file("meta.json", text)); }), "meta.json"));
  }
  for (std::string const dtype : {"16", "\"int8\"", "null"})
    CHECK(has(what([&] { read_meta(folder.file("meta.json", "{\"vocab_size\": 2, \"dtype\": " + dtype + "}")); }),
              "dtype: expected \"uint16\" or \"uint32\", got " + dtype));
  CHECK(read_meta(folder.file("meta.json", "{\"vocab_size\": 300}")).vocab_size == 300);
}

TEST_CASE("targets are inputs one token later, to the last token of the file") {
  Folder const folder;
  std::string bytes;
  for (int i = 0; i < 12; ++i) bytes += {static_cast<char>(i), '\0'};
  TokenFile const tokens(folder.file("ids.bin", bytes), 2);
  std::vector<std::int32_t> x(4), y(4);
  for (std::int64_t const start : {0, 5, 7}) {
    tokens.read(start, 12, x, y);
    for (std::size_t i = 0; i < x.size(); ++i) {
      CHECK(x[i] == static_cast<std::int32_t>(start) + static_cast<std::int32_t>(i));
      CHECK(y[i] == x[i] + 1);
    }
  }
  for (std::int64_t const start : {-1, 8}) {
    CHECK(has(what([&] { tokens.read(start, 12, x, y); }), "12 tokens, too few for a block of 4 tokens"));
  }
}

TEST_CASE(
    "a sequence with a token outside the vocabulary is refused by file, position and token, as input and target") {
  Folder const folder;
  auto const narrow = folder.file("narrow.bin", packed<std::uint16_t>({1, 2, 65535, 3, 4, 5}));
  auto const wide = folder.file("wide.bin", packed<std::uint32_t>({1, 2, 4294967295u, 3, 4, 5}));
  std::vector<std::int32_t> x(2), y(2);
  TokenFile const narrow_file(narrow, 2), wide_file(wide, 4);
  for (std::int64_t const start : {0, 1, 2}) {
    CHECK(has(what([&] { narrow_file.read(start, 10, x, y); }),
              "/narrow.bin' has token 65535 at position 2, outside the vocabulary of 10: the file has changed"));
    CHECK(has(what([&] { wide_file.read(start, 10, x, y); }), "/wide.bin' has token 4294967295 at position 2"));
  }
  CHECK_NOTHROW(narrow_file.read(3, 6, x, y));
  CHECK(has(what([&] { narrow_file.read(3, 5, x, y); }), "token 5 at position 5"));
}

TEST_CASE("token files are found by name, by pattern and by folder, and are shards in the order of their names") {
  Folder const folder;
  auto const path = [&](std::string const& name) { return folder.path / name; };
  auto const in_folder = [&](Split split) { return find_token_files(folder.path.string(), split); };
  CHECK(in_folder(Split::train) == std::vector{path("train.bin")});  // which opening says is missing
  for (auto const* const name : {"x_train_000002.bin", "x_train_000001.bin", "x_train_000010.bin", "x_val_000000.bin",
                                 "x_train_000001.txt", "other.bin"})
    folder.file(name, packed<std::uint16_t>({1, 2, 3}));
  std::vector const shards{path("x_train_000001.bin"), path("x_train_000002.bin"), path("x_train_000010.bin")};
  CHECK(in_folder(Split::train) == shards);
  CHECK(in_folder(Split::val) == std::vector{path("x_val_000000.bin")});
  CHECK(find_token_files(path("x_train_*.bin").string(), Split::val) == shards);
  CHECK(find_token_files(path("x_train_00000[2-9].bin").string(), Split::train) == std::vector{shards[1]});
  CHECK(find_token_files(path("none.bin").string(), Split::train) == std::vector{path("none.bin")});
  CHECK(has(what([&] { find_token_files(path("y_*.bin").string(), Split::val); }),
            "setting 'val_data': expected token files, but no file matches '"));
  CHECK(has(what([&] { find_token_files(path("corpus.TXT").string(), Split::train); }),
            "corpus.TXT' is a text by its name; make tokens of it with: nanogpt prepare --dataset=NAME --data="));
  CHECK(has(what([&] { find_token_files(path("x_train_*").string(), Split::val); }),
            "setting 'val_data': expected token files, but '"));
  folder.file("a[b].bin", "");
  CHECK(find_token_files(path("a[b].bin").string(), Split::train) == std::vector{path("a[b].bin")});

  auto const dataset = open_dataset({"", path("x_train_*.bin").string(), ""});
  CHECK(dataset.train.size() == 9);
  CHECK(dataset.val.file(0).path() == path("x_val_000000.bin"));
  CHECK(open_dataset({"", folder.path.string(), path("other.bin").string()}).val.file(0).path() == path("other.bin"));
  // Without validation data, none are looked for.
  std::filesystem::remove(path("x_val_000000.bin"));
  CHECK(has(what([&] { open_dataset({"", path("x_train_*.bin").string(), ""}); }), "val.bin' is missing"));
  CHECK(open_dataset({"", path("x_train_*.bin").string(), ""}, false).val.size() == 0);
  folder.file("train.bin", packed<std::uint16_t>({1}));
  CHECK(in_folder(Split::train) == std::vector{path("train.bin")});
}

TEST_CASE("large files are checked once: the largest token is remembered by path, size and time, never otherwise") {
  Folder const folder;
  ::setenv("XDG_CACHE_HOME", (folder.path / "cache").c_str(), 1);
  fs::create_directory(folder.path / "data");
  std::string const bytes(least_remembered_bytes, '\1');
  auto const path = folder.file("data/train.bin", bytes);
  auto const remembered = [&] { return remembered_largest(TokenFile(path, 2)); };
  auto const check = [&](int ranks = 1) {
    TokenFile const file(path, 2);
    std::int64_t most = -1;
    for (int rank = 0; rank < ranks; ++rank) most = std::max(most, check_part({&file}, 65536, rank, ranks, {})[0]);
    remember_largest({{&file, most}});
  };
  CHECK_FALSE(remembered());
  check();
  CHECK(remembered() == 0x0101);
  CHECK_FALSE(fs::exists(folder.path / "cache"));
  CHECK_FALSE(remembered_largest(TokenFile(path, 4)));  // other tokens

  auto const time = fs::last_write_time(path);
  fs::last_write_time(path, time + std::chrono::nanoseconds(1));
  CHECK_FALSE(remembered());
  fs::last_write_time(path, time);
  CHECK(remembered() == 0x0101);
  std::ofstream(path, std::ios::app) << "ab";
  fs::last_write_time(path, time);
  CHECK_FALSE(remembered());
  check(3);
  CHECK(remembered() == 'b' * 256 + 'a');  // in the last rank's part

  // A file that changes while it is checked is not remembered.
  {
    TokenFile const file(path, 2);
    fs::last_write_time(path, time + std::chrono::seconds(1));
    remember_largest({{&file, 7}});
    CHECK_FALSE(remembered());
  }
  // Answers that are damaged are none. Where nothing can be written beside the data, the cache folder has them.
  auto const answers = folder.path / "data" / ".nanogpt_tokens.json";
  check();
  for (std::string const damaged : {"", "[]", "{", "{\"train.bin\": 3}", "{\"train.bin\": {\"largest\": 1}}"}) {
    std::ofstream(answers) << damaged;
    CHECK_FALSE(remembered());
  }
  fs::remove(answers);
  fs::create_directories(answers / "in the way");
  check();
  CHECK(remembered() == 'b' * 256 + 'a');
  CHECK(fs::exists(folder.path / "cache" / "nanogpt" / "tokens.json"));
  // Nor there: a check is done again, and nothing fails.
  fs::remove_all(folder.path / "cache");
  folder.file("cache", "a file");
  check();
  CHECK_FALSE(remembered());
  // Small files leave nothing behind.
  auto const small = folder.file("small.bin", "abcd");
  TokenFile const file(small, 2);
  remember_largest({{&file, 5}});
  CHECK_FALSE(remembered_largest(file));
  CHECK_FALSE(fs::exists(folder.path / ".nanogpt_tokens.json"));
  ::unsetenv("XDG_CACHE_HOME");
}

TEST_CASE("a check names the first token outside the vocabulary, and tells how far it is") {
  Folder const folder;
  std::string bytes(std::size_t{20} << 20, '\0');
  bytes[(std::size_t{18} << 20) + 1] = '\1';
  TokenFile const file(folder.file("train.bin", bytes), 2);
  std::vector<std::uint64_t> told;
  std::uint64_t all = 0;
  auto const progress = [&](std::uint64_t done, std::uint64_t total) { told.push_back(done), all = total; };
  CHECK(check_part({&file, &file}, 257, 0, 1, progress) == std::vector<std::int64_t>{256, 256});
  CHECK(all == 2 * bytes.size());
  CHECK(told.back() == all);
  CHECK(std::is_sorted(told.begin(), told.end()));
  CHECK(told.size() > 4);
  CHECK(
      has(what([&] { check_part({&file}, 256, 1, 2, {}); }), "train.bin' has token 256 at position 9437184, outside"));
  CHECK_NOTHROW(check_part({&file}, 256, 0, 2, {}));  // the other rank's part
}

TEST_CASE(
    "a tokenizer is read from the files beside meta.json, which must be there and make as many tokens as it says") {
  Folder const folder;
  fsdp::testing::BytePairs const pairs{{{"a", "b"}}};
  auto const meta = [&](std::string const& encoder, int size) {
    return folder.file("meta.json", "{\"tokenizer\": \"gpt2\", \"vocab_size\": " + std::to_string(size) +
                                        ", \"encoder_json\": \"" + encoder + "\", \"vocab_bpe\": \"m\"}");
  };
  folder.file("m", pairs.vocab_bpe());
  CHECK(has(what([&] { read_meta(meta("e", 258)); }), "/e' is missing"));
  folder.file("e", pairs.encoder_json());
  for (std::string const outside : {"", ".", "..", "../e", "/e"})
    CHECK(has(what([&] { read_meta(meta(outside, 258)); }), "encoder_json: expected the name of a file"));
  auto const tokenizer = open_tokenizer(read_meta(meta("e", 258)));
  REQUIRE(tokenizer != nullptr);
  CHECK(tokenizer->encode("abc") == std::vector<std::int64_t>{256, 'c'});
  CHECK(has(what([&] { open_tokenizer(read_meta(meta("e", 300))); }), "has 258 tokens, but"));
  CHECK(open_tokenizer(Meta{}) == nullptr);
}
