// SPDX-License-Identifier: Apache-2.0
// nanogpt prepare: token files of texts and of documents, whatever the threads and pieces.
// links: transformer_data
#include "transformer/data/prepare.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <future>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "tests/catch.hpp"
#include "tests/nanogpt/gpt2_cases.hpp"
#include "tests/support/byte_pair_files.hpp"
#include "tests/support/messages.hpp"
#include "tests/support/sanitized.hpp"
#include "tests/support/temporary_folder.hpp"
#include "transformer/data/corpus.hpp"
#include "transformer/data/dataset.hpp"
#include "transformer/data/excerpt.hpp"
#include "transformer/tokenizer/byte_pair.hpp"
#include "transformer/tokenizer/utf8.hpp"

namespace {

using namespace transformer;
namespace fs = std::filesystem;
using fsdp::testing::BytePairs;
using fsdp::testing::has;
using fsdp::testing::what;
using Folder = fsdp::testing::TemporaryFolder;
using Ids = std::vector<std::int64_t>;

std::string contents(fs::path const& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

PrepareOptions options_of(Folder const& folder, fs::path const& data) {
  PrepareOptions options;
  options.data = data;
  options.folder = folder.path / "out";
  return options;
}

PrepareOptions with_byte_pairs(Folder const& folder, fs::path const& data, BytePairs const& pairs) {
  auto options = options_of(folder, data);
  options.encoder_json = folder.file("e", pairs.encoder_json());
  options.vocab_bpe = folder.file("m", pairs.vocab_bpe());
  return options;
}

Ids tokens_of(fs::path const& path, std::size_t token_bytes = 2) {
  TokenFile const file(path, token_bytes);
  Ids ids;
  for (std::int64_t i = 0; i < file.size(); ++i) ids.push_back(file.at(i));
  return ids;
}

/// The output of prepare, as text.
std::string text_of(fs::path const& folder, std::string const& split) {
  auto const meta = read_meta(folder / "meta.json");
  return open_tokenizer(meta)->decode(tokens_of(folder / (split + ".bin"), meta.token_bytes));
}

std::vector<std::string> names_in(fs::path const& folder) {
  std::vector<std::string> names;
  for (auto const& entry : fs::directory_iterator(folder)) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace

TEST_CASE("a prepared text is split 90/10 by characters and decodes to itself") {
  Folder const folder;
  std::string const text =
      "h\xc3\xa9llo w\xc3\xb6rld \xe2\x82\xac \xf0\x9f\x98\x80\nabc";  // 2-, 3- and 4-byte characters
  auto const prepared = prepare_data(options_of(folder, folder.file("text", text)));
  CHECK(prepared.characters == 19);
  CHECK(prepared.train_tokens == 17);  // floor(0.9 * 19)
  CHECK(prepared.val_tokens == 2);
  CHECK(prepared.documents == 0);

  auto const meta = read_meta(folder.path / "out" / "meta.json");
  CHECK(meta.vocab_size == prepared.vocab_size);
  CHECK(meta.token_bytes == 2);
  CHECK(fs::file_size(folder.path / "out" / "train.bin") == 34);
  CHECK(text_of(folder.path / "out", "train") + text_of(folder.path / "out", "val") == text);
  auto ids = tokens_of(folder.path / "out" / "train.bin");
  for (auto const id : tokens_of(folder.path / "out" / "val.bin")) ids.push_back(id);
  CHECK(open_tokenizer(meta)->encode(text) == ids);
  CHECK(names_in(folder.path / "out") == std::vector<std::string>{"meta.json", "train.bin", "val.bin"});
}

TEST_CASE("symbols are numbered by code point and meta.json says so both ways") {
  Folder const folder;
  prepare_data(options_of(folder, folder.file("text", "ba\nc\"a\\")));
  std::ifstream stream(folder.path / "out" / "meta.json");
  auto const json = nlohmann::json::parse(stream);
  CHECK(json["itos"] == nlohmann::json({"\n", "\"", "\\", "a", "b", "c"}));
  CHECK(json["stoi"]["a"] == 3);
  CHECK(json["vocab_size"] == 6);
  CHECK(json["dtype"] == "uint16");
}

TEST_CASE("more than 65,535 symbols take uint32 and meta.json says so") {
  if (fsdp::testing::has_thread_sanitizer) return;  // slow, and the threads are those of the other cases
  Folder const folder;
  std::string text;
  for (char32_t code = 0; code < 70000; ++code)
    if (code < 0xd800 || code > 0xdfff) text += encode_utf8(code);
  auto const prepared = prepare_data(options_of(folder, folder.file("text", text)));
  CHECK(prepared.vocab_size == 70000 - 2048);
  auto const meta = read_meta(folder.path / "out" / "meta.json");
  CHECK(meta.token_bytes == 4);
  CHECK(tokens_of(folder.path / "out" / "val.bin", 4).back() == prepared.vocab_size - 1);
}

TEST_CASE("where tokens are characters, bytes that are not UTF-8 are refused with their offset, and nothing is left") {
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
    for (std::size_t const piece : {1u, 3u, 1000u}) {
      INFO(bad.name << " in pieces of " << piece);
      Folder const folder;
      auto options = options_of(folder, folder.file("text", bad.text));
      options.piece_bytes = piece;
      CHECK(has(what([&] { prepare_data(options); }), bad.offset + " "));
      CHECK(!fs::exists(folder.path / "out"));
    }
  }
}

TEST_CASE("a text's tokens do not depend on threads and pieces, and are those of its two parts") {
  std::string text;
  for (auto const& hard : fsdp::testing::gpt2_cases) text.append(hard.text).append("\xff\xe4 ");
  auto const pairs = BytePairs::random(9, 100, "ab e'st\xe4\xb8");
  for (bool const byte_pairs : {false, true}) {
    Folder const folder;
    auto const data = folder.file("text", byte_pairs ? text : encode_utf8(0x4e2d) + text.substr(0, text.find('\xff')));
    auto options = byte_pairs ? with_byte_pairs(folder, data, pairs) : options_of(folder, data);
    options.val_fraction = 0.3;
    auto const all = contents(data);
    auto const characters = count_characters(all);
    std::size_t place = 0;
    for (std::size_t i = 0; i < static_cast<std::size_t>(static_cast<double>(characters) * (1 - 0.3)); ++i)
      place += utf8_at(all, place).length;

    for (std::size_t const piece : {1u, 2u, 7u, 64u, 1u << 20}) {
      options.piece_bytes = piece;
      options.threads = piece % 2 == 0 ? 1 : 3;
      auto const prepared = prepare_data(options);
      auto const tokenizer = open_tokenizer(read_meta(folder.path / "out" / "meta.json"));
      INFO("pieces of " << piece);
      CHECK(prepared.characters == static_cast<std::int64_t>(characters));
      CHECK(tokens_of(folder.path / "out" / "train.bin") == tokenizer->encode(all.substr(0, place)));
      CHECK(tokens_of(folder.path / "out" / "val.bin") == tokenizer->encode(all.substr(place)));
    }
  }
}

TEST_CASE("documents go to one split each, in order, with an end-of-text id after each") {
  Folder const folder;
  auto const root = folder.path / "docs";
  fs::create_directories(root / "b");
  auto const file = [&](std::string const& name, std::string const& bytes) { folder.file("docs/" + name, bytes); };
  std::vector<std::string> expected;
  file("a.txt", "first document\nwith lines\n");
  expected.push_back("first document\nwith lines\n");
  std::string lines;
  for (int i = 0; i < 40; ++i) {
    auto const text = "line " + std::to_string(i) + " \xe4\xb8\xad";
    lines += (i % 3 == 0 ? "\n  \r\n" : "") + nlohmann::json{{"id", i}, {"text", text}}.dump() + "\n";
    expected.push_back(text);
  }
  file("b/c.jsonl", lines.substr(0, lines.size() - 1));  // the last line without its end
  file("b/d.txt", "");
  expected.emplace_back();
  file("ignored.md", "not a document");
  file("z.txt", "<|endoftext|>");
  expected.emplace_back("<|endoftext|>");

  BytePairs const pairs = BytePairs::random(10, 30, "lined ");
  auto options = with_byte_pairs(folder, root, pairs);
  options.val_fraction = 0.25;
  DocumentSplit const split(options.val_fraction);
  std::map<Split, Ids> ids;
  BytePair const tokenizer({pairs.encoder_json(), pairs.vocab_bpe()});
  for (std::size_t document = 0; document < expected.size(); ++document) {
    auto& into = ids[split.of(static_cast<std::int64_t>(document))];
    for (auto const id : tokenizer.encode(expected[document])) into.push_back(id);
    into.push_back(*tokenizer.end_of_text());
  }
  for (std::size_t const piece : {1u, 10u, 1u << 20}) {
    options.piece_bytes = piece;
    options.threads = piece == 10 ? 2 : 1;
    auto const prepared = prepare_data(options);
    CHECK(prepared.documents == 43);
    CHECK(prepared.vocab_size == 256 + 30 + 1);
    CHECK(tokens_of(folder.path / "out" / "train.bin") == ids[Split::train]);
    CHECK(tokens_of(folder.path / "out" / "val.bin") == ids[Split::val]);
    CHECK(names_in(folder.path / "out") ==
          std::vector<std::string>{"encoder.json", "meta.json", "train.bin", "val.bin", "vocab.bpe"});
  }
  // Characters end documents with a symbol of their own.
  auto characters = options_of(folder, root);
  characters.val_fraction = options.val_fraction;
  CHECK(prepare_data(characters).documents == 43);
  std::map<Split, std::string> texts;
  for (std::size_t document = 0; document < expected.size(); ++document)
    texts[split.of(static_cast<std::int64_t>(document))] += expected[document] + "<|endoftext|>";
  CHECK(text_of(folder.path / "out", "train") == texts[Split::train]);
  CHECK(text_of(folder.path / "out", "val") == texts[Split::val]);
}

TEST_CASE("the validation split has its fraction of documents, to within one, drawn from all over") {
  for (double const fraction : {0.0005, 0.01, 0.1, 0.3, 0.5, 0.77, 0.99}) {
    DocumentSplit const split(fraction);
    std::int64_t val = 0, same_place = 0;
    auto const period = static_cast<std::int64_t>(1 / fraction);
    for (std::int64_t i = 0; i < 20000; ++i) {
      bool const chosen = split.of(i) == Split::val;
      val += chosen;
      same_place += chosen && i % period == 0;
      if (std::abs(static_cast<double>(val) - static_cast<double>(i + 1) * fraction) > 1 + 1e-9)
        FAIL(val << " of " << i + 1 << " with " << fraction);
    }
    INFO(fraction);
    if (period > 1 && val > 100) CHECK(same_place < val * 3 / 4);  // not every period-th document
  }
}

TEST_CASE("bad corpora are refused by file and line, and nothing is left") {
  Folder const folder;
  auto const refused = [&](PrepareOptions const& options) {
    auto const message = what([&] { prepare_data(options); });
    CHECK(!fs::exists(options.folder));
    return message;
  };
  CHECK(has(refused(options_of(folder, folder.path / "none")), "/none' cannot be opened"));
  CHECK(has(refused(options_of(folder, folder.file("nothing", ""))), "is empty"));
  fs::create_directory(folder.path / "empty");
  CHECK(has(refused(options_of(folder, folder.path / "empty")),
            "expected files *.txt, *.jsonl or *.ndjson in the folder"));
  // tests/transformer/json_lines.cpp has all that may be wrong with a line.
  for (std::string const bad : {"[]", "{", "{\"text\": 1}", "{\"Text\": \"a\"}", "{\"text\": \"\xff\"}", "\x01"}) {
    INFO(bad);
    auto options =
        options_of(folder, folder.file("bad.jsonl", "{\"text\": \"a\"}\n\n" + bad + "\n{\"text\": \"b\"}\n"));
    CHECK(has(refused(options), "bad.jsonl', line 3"));
    options.piece_bytes = 4;
    CHECK(has(refused(options), "bad.jsonl', line 3"));
  }
  // A NUL between two documents ends neither the file nor the line.
  auto const nul = std::string("{\"text\": \"a\"}\0{\"text\": \"b\"}\n", 28);
  CHECK(has(refused(options_of(folder, folder.file("bad.jsonl", nul))), "bad.jsonl', line 1, column 14: '\\x00{"));
  BytePairs pairs;
  auto const one = folder.file("one.jsonl", "{\"text\": \"a\"}");
  auto options = with_byte_pairs(folder, one, pairs);
  options.val_fraction = 0.001;
  CHECK(has(refused(options), "'val_fraction': with 0.001, none of the 1 documents is for validation"));
  pairs.marker = false;
  CHECK(has(refused(with_byte_pairs(folder, one, pairs)), "expected a token '<|endoftext|>'"));
  options.vocab_bpe = folder.path / "none";
  CHECK(has(refused(options), "/none' cannot be opened"));
  auto nowhere = options_of(folder, one);
  nowhere.folder = one / "out";
  CHECK(has(what([&] { prepare_data(nowhere); }), "cannot be made"));
}

TEST_CASE("files of other formats are refused by name, with the command that makes text of them") {
  Folder const folder;
  struct Case {
    char const* name;
    std::string bytes, says;
  };
  std::vector<Case> const cases{
      {"a.txt.gz", "\x1f\x8b\x08",
       "a.txt.gz' is compressed by gzip, expected text: decompress it with zcat, as in zcat '"},
      {"a.jsonl", "\x28\xb5\x2f\xfd rest", "compressed by zstd, expected text: decompress it with zstdcat"},
      {"a.xz", std::string("\xfd\x37zXZ\0", 6), "decompress it with xzcat"},
      {"a.bz2", "BZh91AY&SY", "decompress it with bzcat"},
      {"a.zip", "PK\x03\x04", "decompress it with unzip -p"},
      {"a.txt", std::string("\xff\xfe") + "a",
       "a.txt' is a text in UTF-16, expected UTF-8: convert it, as in iconv -f UTF-16"},
      {"a.csv", "\xfe\xff\n", "is a text in UTF-16"},
      {"a.parquet", "PAR1 columns PAR1", "a.parquet' is a Parquet file"},
      {"b.parquet", "PAR1 columns PAR1", "[['text']].to_json('"},
  };
  for (auto const& bad : cases) {
    INFO(bad.name);
    auto const path = folder.file(bad.name, bad.bytes);
    auto const options = options_of(folder, path);
    auto const message = what([&] { prepare_data(options); });
    CHECK(has(message, bad.says));
    CHECK(message.size() < 3 * path.string().size() + 400);
    CHECK(!fs::exists(options.folder));
    auto as_val = options_of(folder, folder.file("good", "some text"));
    as_val.val_data = path;
    CHECK(has(what([&] { prepare_data(as_val); }), bad.says));
    CHECK(!fs::exists(options.folder));
  }
  for (std::string const text : {"PAR1 is a text", "BZh", "BZhoo is one too", "P", "PK is a text"}) {
    INFO(text);
    CHECK(what([&] { prepare_data(options_of(folder, folder.file("text", text))); }) == "nothing was thrown");
  }
  // In a folder too: other files are ignored, and counted.
  fs::create_directory(folder.path / "docs");
  folder.file("docs/b.parquet", "PAR1 columns PAR1");
  CHECK(has(what([&] { prepare_data(options_of(folder, folder.path / "docs")); }), "b.parquet' is a Parquet file"));
  folder.file("docs/a.md", "text");
  folder.file("docs/.hidden", "text");
  CHECK(
      has(what([&] { prepare_data(options_of(folder, folder.path / "docs")); }), "got 2 other files, such as 'a.md'"));
  folder.file("docs/a.jsonl", "{\"text\": \"a\"}\n{\"text\": \"b\"}\n");
  auto some = options_of(folder, folder.path / "docs");
  some.val_fraction = 0.5;
  auto const prepared = prepare_data(some);
  CHECK(prepared.ignored == 2);
  CHECK(prepared.first_ignored.filename() == "a.md");
  folder.file("docs/z.txt", "\x1f\x8b\x08");
  CHECK(has(what([&] { prepare_data(some); }), "z.txt' is compressed by gzip"));
}

TEST_CASE("content decides what a file holds, unless its ending does") {
  if (fsdp::testing::sanitized && fsdp::testing::has_thread_sanitizer) return;  // one thread
  Folder const folder;
  std::string const lines = "{\"text\": \"a\"}\n{\"text\": \"b\"}\n";
  auto const documents = [&](char const* name, std::string const& bytes) {
    auto options = options_of(folder, folder.file(name, bytes));
    options.val_fraction = 0.5;
    return prepare_data(options).documents;
  };
  for (auto const* const name : {"x.jsonl", "x.JSONL", "x.ndjson", "x.json", "x.JSON", "x", "x.md"}) {
    INFO(name);
    CHECK(documents(name, lines) == 2);
    CHECK(documents(name, "\xef\xbb\xbf" + lines) == 2);
    CHECK(documents(name, "\n \n" + lines) == 2);
  }
  for (auto const* const name : {"x.txt", "x.TXT"})
    for (auto const& text : {lines, std::string("[]"), std::string("{")}) {
      INFO(name << " " << text);
      CHECK(documents(name, text + "some text") == 0);
    }
  CHECK(documents("x.md", "text [with] {these}") == 0);

  auto const refused = [&](char const* name, std::string const& bytes) {
    auto const options = options_of(folder, folder.file(name, bytes));
    fs::remove_all(options.folder);
    auto const message = what([&] { prepare_data(options); });
    CHECK(!fs::exists(options.folder));
    return message;
  };
  for (auto const* const name : {"x.json", "x.md", "x"}) {
    INFO(name);
    auto const array = refused(name, "[{\"text\": \"a\"}]");
    CHECK(
        has(array, "' begins with '[', as JSON does, and an array is no document: expected text, or one JSON object"));
    CHECK(has(array, "jq -c '.[]' FILE | nanogpt prepare --data=-"));
    CHECK(has(array, "to train on it as one text, put it into a file whose name ends in .txt"));
    auto const object = refused(name, "\n {\n  \"text\": \"a\"\n}\n");
    CHECK(has(
        object,
        "' begins with '{', as JSON does, and its first line is not a JSON object (column 2: the line ends before"));
    CHECK(has(object, "jq -c . FILE | nanogpt prepare --data=-"));
  }
  CHECK(has(refused("x.json", "{\"data\": []}"), "line 1: the object has no key \"text\"; its keys are: \"data\""));
  CHECK(has(refused("x.csv", "text,label\na,1\n"), "x.csv' is a .csv file, expected text or .jsonl."));
  CHECK(has(refused("x.CSV", "text,label\na,1\n"), "pandas.read_csv('"));
  CHECK(has(refused("x.tsv", "text\tlabel\na\t1\n"), "pandas.read_table('"));
  CHECK(has(refused("x.csv", "text\n"), "put it into a file whose name ends in .txt"));

  // In a folder, endings decide: .txt is one document, and files of other endings are left out with a word.
  fs::create_directory(folder.path / "docs");
  folder.file("docs/1.TXT", "[a]");
  folder.file("docs/2.ndjson", lines);
  folder.file("docs/3.JSONL", lines);
  folder.file("docs/4.json", lines);
  auto options = options_of(folder, folder.path / "docs");
  options.val_fraction = 0.5;
  auto const prepared = prepare_data(options);
  CHECK(prepared.documents == 5);
  CHECK(prepared.ignored == 1);
}

TEST_CASE("a data set that was half replaced is not opened until it is prepared again") {
  Folder const folder;
  auto const options = options_of(folder, folder.file("t.txt", "abc b a abc b a abc b a"));
  prepare_data(options);
  open_dataset({"", (options.folder / "train.bin").string(), ""});
  fs::remove(options.folder / "meta.json");
  fs::create_directories(options.folder / "meta.json" / "in its way");  // the last name cannot be given
  auto const other = options_of(folder, folder.file("u.txt", "uvw v u uvw v u uvw v u"));
  CHECK(has(what([&] { prepare_data(other); }), "cannot be renamed to"));
  fs::remove_all(options.folder / "meta.json");
  auto const open = [&] { open_dataset({"", (options.folder / "train.bin").string(), ""}); };
  CHECK(has(what(open), "may have files of two data sets, because nanogpt prepare was killed while it replaced them"));
  prepare_data(other);
  open();
}

TEST_CASE("without a validation fraction all is for training, and a val.bin of other data goes") {
  Folder const folder;
  auto const pairs = BytePairs::random(3, 20, "abc ");
  for (bool const byte_pairs : {false, true}) {
    for (bool const documents : {false, true}) {
      INFO(byte_pairs << documents);
      auto const data = documents ? folder.file("d.jsonl", "{\"text\": \"abc\"}\n{\"text\": \"b a\"}\n")
                                  : folder.file("t.txt", "abc b a");
      auto options = byte_pairs ? with_byte_pairs(folder, data, pairs) : options_of(folder, data);
      options.val_fraction = 0.5;
      CHECK(prepare_data(options).has_val);
      REQUIRE(fs::exists(options.folder / "val.bin"));
      options.val_fraction = 0;
      auto const prepared = prepare_data(options);
      CHECK_FALSE(prepared.has_val);
      CHECK(prepared.val_tokens == 0);
      CHECK_FALSE(fs::exists(options.folder / "val.bin"));
      CHECK(text_of(options.folder, "train") == (documents ? "abc<|endoftext|>b a<|endoftext|>" : "abc b a"));
    }
  }
}

TEST_CASE(
    "validation data of their own: texts, lines and folders, in one vocabulary, and nothing of them is trained on") {
  Folder const folder;
  auto const pairs = BytePairs::random(3, 20, "abc ");
  fs::create_directory(folder.path / "docs");
  folder.file("docs/1.txt", "ab");
  folder.file("docs/2.txt", "c");
  struct Form {
    fs::path path;
    std::string text;
  };
  std::vector<Form> const train{
      {folder.file("t.txt", "abc b a"), "abc b a"},
      {folder.file("t.jsonl", "{\"text\": \"abc\"}\n{\"text\": \"b\"}"), "abc<|endoftext|>b<|endoftext|>"},
      {folder.path / "docs", "ab<|endoftext|>c<|endoftext|>"}};
  std::vector<Form> const val{
      {folder.file("v.txt", "xyz"), "xyz"},
      {folder.file("v.jsonl", "{\"text\": \"x\"}\n{\"text\": \"y\"}\n"), "x<|endoftext|>y<|endoftext|>"},
      {folder.path / "docs", "ab<|endoftext|>c<|endoftext|>"}};
  for (bool const byte_pairs : {false, true}) {
    for (auto const& of_train : train) {
      for (auto const& of_val : val) {
        INFO(byte_pairs << of_train.text << " / " << of_val.text);
        auto options = byte_pairs ? with_byte_pairs(folder, of_train.path, pairs) : options_of(folder, of_train.path);
        options.val_data = of_val.path;
        options.piece_bytes = 2;
        options.threads = 2;
        CHECK(prepare_data(options).has_val);
        CHECK(text_of(options.folder, "train") == of_train.text);
        CHECK(text_of(options.folder, "val") == of_val.text);
      }
    }
  }
  auto options = options_of(folder, train[0].path);
  options.val_data = folder.file("none.jsonl", "\n\n");
  CHECK(has(what([&] { prepare_data(options); }), "none.jsonl' has no documents"));
  options.val_data = folder.file("empty", "");
  CHECK(has(what([&] { prepare_data(options); }), "/empty' is empty"));
  options.val_data.clear();
  options.val_fraction = 0;
  options.data = folder.file("none.jsonl", "\n\n");
  CHECK(has(what([&] { prepare_data(options); }), "none.jsonl' has no documents"));
}

TEST_CASE("a pipe is read to its end: text, or lines of JSON objects, with nothing left beside the tokens") {
  Folder const folder;
  auto const pipe = folder.path / "pipe";
  REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
  auto const prepare_from_pipe = [&](std::string const& bytes) {
    auto const writer = std::async(std::launch::async, [&] { std::ofstream(pipe, std::ios::binary) << bytes; });
    auto options = options_of(folder, pipe);
    options.val_fraction = 0.3;
    return prepare_data(options);
  };
  std::string text;
  for (int i = 0; i < 30'000; ++i) text += "line " + std::to_string(i) + '\n';  // more than a pipe holds
  auto prepared = prepare_from_pipe(text);
  CHECK(prepared.documents == 0);
  CHECK(text_of(folder.path / "out", "train") + text_of(folder.path / "out", "val") == text);
  CHECK(names_in(folder.path / "out") == std::vector<std::string>{"meta.json", "train.bin", "val.bin"});
  CHECK(has(what([&] { prepare_from_pipe("{ is no object\n"); }), "(column 3: expected JSON, got 'is no object')"));
  CHECK(has(what([&] { prepare_from_pipe("[\n"); }), "pipe' begins with '[', as JSON does"));
  std::string lines = "\n";
  for (int i = 0; i < 10; ++i) lines += "{\"text\": \"a\"}\n";
  CHECK(prepare_from_pipe(lines).documents == 10);
  CHECK(has(what([&] { prepare_from_pipe(lines + "{\"Text\": 1}\n"); }),
            "pipe', line 12: the object has no key \"text\""));
  CHECK(has(what([&] { prepare_from_pipe(""); }), "pipe' is empty"));
  CHECK(has(what([&] { prepare_from_pipe("ab\xff"); }), "pipe': byte 2"));
}

TEST_CASE("messages show the beginning of what a file holds, and nothing that a terminal would obey") {
  CHECK(excerpt("a b") == "a b");
  CHECK(excerpt("\x1b[2J\xff") == "\\x1b[2J\\xff");
  CHECK(excerpt(std::string(60, 'x')) == std::string(60, 'x'));
  CHECK(excerpt(std::string(1'000'000, 'x')) == std::string(60, 'x') + "...");
  CHECK(excerpt(std::string(59, 'x') + "\xe2\x82\xac") == std::string(59, 'x') + "...");
  // encoder.json where vocab.bpe is expected is one line of a megabyte.
  Folder const folder;
  BytePairs pairs;
  auto options = with_byte_pairs(folder, folder.file("text", "some text"), pairs);
  options.vocab_bpe = folder.file("m", "\x1b{\"" + std::string(1'000'000, 'x'));
  auto const message = what([&] { prepare_data(options); });
  CHECK(has(message, "line 1: expected two symbols with a blank between them, got '\\x1b{\"xxx"));
  CHECK(message.size() < 300);
  options.vocab_bpe = folder.file("m", "");
  options.encoder_json = folder.file("e", "{\"" + std::string(1'000'000, 'x') + "\": -1}");
  CHECK(what([&] { prepare_data(options); }).size() < 400);
}

TEST_CASE("tinyshakespeare has 65 symbols and 1,003,854 and 111,540 tokens, of GPT-2's 301,966 and 36,059") {
  char const* const data = std::getenv("FSDP_TEST_DATA");
  if (data == nullptr) {
    WARN("skipped: FSDP_TEST_DATA is not set");
    return;
  }
  if (fsdp::testing::sanitized) return;  // other texts have threads and pieces, too
  Folder const folder;
  auto options = options_of(folder, fs::path(data) / "tinyshakespeare.txt");
  auto prepared = prepare_data(options);
  CHECK(prepared.characters == 1115394);
  CHECK(prepared.vocab_size == 65);
  CHECK(prepared.train_tokens == 1003854);
  CHECK(prepared.val_tokens == 111540);

  options.encoder_json = fs::path(data) / "gpt2-encoder.json";
  options.vocab_bpe = fs::path(data) / "gpt2-vocab.bpe";
  options.threads = 2;
  options.piece_bytes = 10'000;
  prepared = prepare_data(options);
  CHECK(prepared.vocab_size == 50257);
  CHECK(prepared.train_tokens == 301966);  // nanoGPT, data/shakespeare/readme.md
  CHECK(prepared.val_tokens == 36059);
  CHECK(text_of(folder.path / "out", "train") + text_of(folder.path / "out", "val") == contents(options.data));
}
