// SPDX-License-Identifier: Apache-2.0
// Tokenizers: GPT-2's words and byte pairs against other statements of both, and that decoding gives back every text.
// skip-tsan
// skip-asan
// links: transformer_data
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <regex>
#include <string>
#include <string_view>
#include <vector>

#include "tests/catch.hpp"
#include "tests/nanogpt/gpt2_cases.hpp"
#include "tests/support/byte_pair_files.hpp"
#include "tests/support/messages.hpp"
#include "transformer/tokenizer/byte_pair.hpp"
#include "transformer/tokenizer/characters.hpp"
#include "transformer/tokenizer/merges.hpp"
#include "transformer/tokenizer/unicode_ranges.hpp"
#include "transformer/tokenizer/utf8.hpp"
#include "transformer/tokenizer/words.hpp"

namespace {

using namespace transformer;
using fsdp::testing::BytePairs;
using fsdp::testing::gpt2_cases;
using fsdp::testing::has;
using fsdp::testing::what;
using Ids = std::vector<std::int64_t>;

std::vector<std::string> words_of(std::string_view text) {
  std::vector<std::string> words;
  for (std::size_t begin = 0; begin < text.size();) {
    auto const end = end_of_word(text, begin);
    words.emplace_back(text.substr(begin, end - begin));
    begin = end;
  }
  return words;
}

/// Whether the words of the text are those of its two parts.
bool words_end_at(std::string_view text, std::size_t position) {
  auto parts = words_of(text.substr(0, position));
  for (auto& word : words_of(text.substr(position))) parts.push_back(word);
  return parts == words_of(text);
}

std::string random_text(std::mt19937& draw, std::vector<std::string> const& alphabet, std::size_t length) {
  std::string text;
  for (std::size_t i = 0; i < length; ++i) text += alphabet[draw() % alphabet.size()];
  return text;
}

/// Texts whose neighbours meet in every way: classes, blanks, contractions, invalid bytes, characters cut in two.
std::vector<std::string> hard_texts() {
  std::vector<std::string> texts;
  for (auto const& hard : gpt2_cases) texts.emplace_back(hard.text);
  std::vector<std::string> const alphabet{"'",
                                          "s",
                                          "r",
                                          "e",
                                          " ",
                                          " ",
                                          "\n",
                                          "1",
                                          "!",
                                          "\xc2\xa0",
                                          "\xe3\x80\x80",
                                          "\xe4\xb8\xad",
                                          "\xc2\xbd",
                                          "\xe4",
                                          "\xb8",
                                          "\xf0\x9f\x98\x80",
                                          "\xf0\x9f",
                                          "\xff"};
  std::mt19937 draw(3);
  for (int i = 0; i < 300; ++i) texts.push_back(random_text(draw, alphabet, 12));
  return texts;
}

std::unique_ptr<BytePair> tokenizer_of(BytePairs const& pairs) {
  return std::make_unique<BytePair>(BytePairFiles{pairs.encoder_json(), pairs.vocab_bpe()});
}

std::string contents(std::string const& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

/// GPT-2's own tokenizer; null, with a note, where its files are not.
std::unique_ptr<BytePair> gpt2() {
  char const* const data = std::getenv("FSDP_TEST_DATA");
  if (data == nullptr) {
    WARN("skipped: FSDP_TEST_DATA is not set");
    return nullptr;
  }
  return std::make_unique<BytePair>(BytePairFiles{contents(std::string(data) + "/gpt2-encoder.json"),
                                                  contents(std::string(data) + "/gpt2-vocab.bpe")});
}

std::uint64_t fnv(std::uint64_t sum, std::uint64_t value) { return (sum ^ value) * 0x100000001b3u; }
constexpr std::uint64_t fnv_start = 0xcbf29ce484222325u;

/// Every scalar value.
template <class Use>
void each_character(Use const& use) {
  for (char32_t code = 0; code < 0x110000; ++code)
    if (code < 0xd800 || code > 0xdfff) use(code);
}

}  // namespace

TEST_CASE("letters, numbers and white space are those of Unicode 16.0, all code points over") {
  // Matches of tiktoken 0.14.0 (the Rust crate regex) for \p{L}, \p{N} and \s, code point by code point; unicodedata2
  // 16.0.0, from which the table comes, agrees.
  CHECK(unicode_version == std::string("16.0.0"));
  std::vector<std::int64_t> counts(4);
  auto sum = fnv_start;
  for (char32_t code = 0; code < 0x110000; ++code) {
    auto const kind = static_cast<std::size_t>(char_class(code));
    ++counts[kind];
    sum = fnv(sum, kind);
  }
  CHECK(counts == std::vector<std::int64_t>{0x110000 - 141028 - 1911 - 25, 141028, 1911, 25});
  CHECK(sum == 0x48b1698009766d10u);
}

TEST_CASE("words are what a regular expression matches") {
  // Only ASCII, for which std::regex knows the classes too.
  std::regex const pattern("'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[0-9]+| ?[^\\sA-Za-z0-9]+|\\s+(?!\\S)|\\s+");
  std::vector<std::string> const alphabet{"'", "'", "s", "t", "r",  "e",  "v", "m", "l", "d", "S",
                                          "x", " ", " ", " ", "\n", "\t", "1", "9", "!", "-", "\x01"};
  std::mt19937 draw(1);
  for (int i = 0; i < 2000; ++i) {
    auto const text = random_text(draw, alphabet, draw() % 24);
    std::vector<std::string> expected;
    for (std::sregex_iterator word(text.begin(), text.end(), pattern), end; word != end; ++word)
      expected.push_back(word->str());
    if (words_of(text) != expected) FAIL("'" << text << "'");
  }
}

TEST_CASE("a byte that is no UTF-8 is a character of its own, neither letter, number nor space") {
  CHECK(words_of("ab\xff"
                 "cd") == std::vector<std::string>{"ab", "\xff", "cd"});
  CHECK(words_of(" \xe4\xb8 x") == std::vector<std::string>{" \xe4\xb8", " x"});
  CHECK(words_of("\xc0\xa0"
                 "1\xed\xa0\x80!") == std::vector<std::string>{"\xc0\xa0", "1", "\xed\xa0\x80!"});
}

TEST_CASE("words of a text that is cut at a sure place are those of the whole") {
  std::int64_t sure = 0;
  for (auto const& text : hard_texts()) {
    for (std::size_t position = 1; position < text.size(); ++position) {
      if (is_sure_cut(text, position)) {
        ++sure;
        if (!words_end_at(text, position)) FAIL("'" << text << "' at " << position);
      } else if (text[position] == ' ' && text[position - 1] > ' ') {
        FAIL("no cut in '" << text << "' before the blank at " << position);
      }
      // And if the text is known up to there alone:
      auto const last = last_sure_cut(std::string_view(text).substr(0, position));
      if (last > 0 && !words_end_at(text, last)) FAIL("'" << text << "' up to " << position << " at " << last);
    }
  }
  CHECK(sure > 1000);
}

TEST_CASE("merges are those of an encoder that goes through them rank by rank, in short words and long ones") {
  std::mt19937 draw(2);
  for (std::uint32_t seed = 0; seed < 40; ++seed) {
    auto const pairs = BytePairs::random(seed, 5 + seed, "abc");
    Merges merges(pairs.merges.size());
    auto const tokens = pairs.tokens();
    auto const id = [&](std::string const& token) {
      return static_cast<Merges::Id>(std::find(tokens.begin(), tokens.end(), token) - tokens.begin());
    };
    for (auto const& [left, right] : pairs.merges) merges.add(id(left), id(right), id(left + right));
    for (std::size_t const length : {1u, 2u, 3u, 7u, 40u, 127u, 128u, 129u, 300u}) {
      auto const word = random_text(draw, {"a", "b", "c", "a"}, length);
      auto const expected = pairs.encode_word(word);
      std::vector<Merges::Id> bytes(word.begin(), word.end());
      auto by_short = bytes, by_long = bytes, by_both = bytes;
      merges.apply_to_short(by_short);
      merges.apply_to_long(by_long);
      merges.apply(by_both);
      CHECK(Ids(by_short.begin(), by_short.end()) == expected);
      CHECK(Ids(by_long.begin(), by_long.end()) == expected);
      CHECK(by_both == by_long);
    }
  }
}

TEST_CASE("a megabyte of one letter is one word, and takes no quadratic time") {
  BytePairs pairs;  // a, aa, aaaa, ... up to 1024
  for (std::string half = "a"; half.size() < 1024; half += half) pairs.merges.emplace_back(half, half);
  auto const tokenizer = tokenizer_of(pairs);
  auto const ids = tokenizer->encode(std::string(std::size_t{1} << 20, 'a'));
  CHECK(ids == Ids(1024, 256 + 9));
}

TEST_CASE("decoding gives back every character and any bytes") {
  auto const pairs = BytePairs::random(5, 200, std::string_view("ab \xe4\xb8\x80\0\xff", 8));
  std::vector<std::unique_ptr<BytePair>> tokenizers;
  tokenizers.push_back(tokenizer_of(pairs));
  if (auto real = gpt2()) tokenizers.push_back(std::move(real));
  std::string all;
  each_character([&](char32_t code) { all += encode_utf8(code); });
  for (auto const& tokenizer : tokenizers) {
    CHECK(tokenizer->decode(tokenizer->encode(all)) == all);
    std::mt19937 draw(4);
    for (int i = 0; i < 2000; ++i) {
      std::string bytes(draw() % 64, '\0');
      for (auto& byte : bytes) byte = static_cast<char>(draw() % 256);
      if (tokenizer->decode(tokenizer->encode(bytes)) != bytes) FAIL("seed 4, text " << i);
    }
  }
}

TEST_CASE("what a cache remembers are the word's own ids") {
  auto const pairs = BytePairs::random(6, 60, "ab");
  auto const tokenizer = tokenizer_of(pairs);
  WordCache cache;
  std::mt19937 draw(7);
  // 30 bytes and 8 ids at most are remembered; more words than slots, and each of them twice.
  for (int i = 0; i < 100'000; ++i) {
    auto const word = random_text(draw, {"a", "b", i % 2 == 0 ? "a" : "c"}, 1 + draw() % 34);
    Ids first, again;
    tokenizer->append(word, first, cache);
    tokenizer->append(word, again, cache);
    if (first != again || tokenizer->decode(first) != word || (i % 100 == 0 && first != pairs.encode_word(word)))
      FAIL("'" << word << "'");
  }
}

TEST_CASE("the end-of-text marker is one id on request alone") {
  BytePairs pairs;
  auto const tokenizer = tokenizer_of(pairs);
  REQUIRE(tokenizer->end_of_text() == 256);
  CHECK(tokenizer->encode("a<|endoftext|><|endoftext|>b", Marker::token) == Ids{'a', 256, 256, 'b'});
  CHECK(tokenizer->encode("<|endoftext|>").size() == 13);
  CHECK(tokenizer->decode(Ids{'a', 256}) == "a<|endoftext|>");
  pairs.marker = false;
  auto const without = tokenizer_of(pairs);
  CHECK_FALSE(without->end_of_text());
  CHECK(without->encode("<|endoftext|>", Marker::token).size() == 13);
}

TEST_CASE("ids outside the vocabulary are refused by name") {
  auto const tokenizer = tokenizer_of({});
  Characters const characters({"a", "b"});
  CHECK(has(what([&] { (void)tokenizer->decode(Ids{257}); }), "token 257 lies outside the vocabulary of 257"));
  CHECK(has(what([&] { (void)tokenizer->decode(Ids{-1}); }), "token -1 lies outside"));
  CHECK(has(what([&] { (void)characters.decode(Ids{2}); }), "token 2 lies outside the vocabulary of 2"));
}

TEST_CASE("a character that the vocabulary lacks is named, on one line") {
  Characters const characters({"a", "b"});
  CHECK(what([&] { (void)characters.encode("ab\xc3\xa9"); }) ==
        "text: character '\xc3\xa9' (U+00E9) is not one of the 2 characters of the vocabulary");
  CHECK(what([&] { (void)characters.encode("a\n"); }) ==
        "text: character U+000A is not one of the 2 characters of the vocabulary");
}

TEST_CASE("files that do not fit together are refused, with the file, the line and why") {
  BytePairs pairs;
  pairs.merges = {{"a", "b"}, {"ab", "c"}, {"b", "c"}};
  auto const json = pairs.encoder_json();
  auto const refused = [&](std::string const& encoder, std::string const& merges) {
    return what([&] { BytePair(BytePairFiles{encoder, merges, "e.json", "m.bpe"}); });
  };
  pairs.merges.resize(2);
  CHECK(refused(pairs.encoder_json(), "a b\r\nab c\r\n") == "nothing was thrown");  // no version, Windows' line ends
  for (std::string const bad : {"", "[]", "{}", "{\"a\": 0", "7"})
    CHECK(has(refused(bad, ""), "'e.json': expected a JSON object of tokens"));
  CHECK(has(refused("{\"a\": 0}", ""), "'e.json': expected a token '\xc4\x80' for the byte 0x00, got none"));
  CHECK(has(refused("{\"a\": 1}", ""), "token 'a': expected a unique id below 1, got 1"));
  CHECK(has(refused("{\"a\": 0, \"b\": 0}", ""), "token 'b': expected a unique id below 2, got 0"));
  CHECK(has(refused("{\"a\": \"0\"}", ""), "expected a unique id below 1, got \"0\""));
  CHECK(has(refused("{\"\": 0}", ""), "a token is empty"));
  CHECK(has(refused("{\"\xe4\xb8\xad\": 0}", ""), "U+4E2D does not represent a byte"));
  for (std::string const bad : {"a", "a b c", " a b", "a  b", "a "})
    CHECK(has(refused(json, "#version\n" + bad + "\n"), "'m.bpe', line 2: expected two symbols with a blank"));
  CHECK(has(refused(json, "a x\n"), "'m.bpe', line 1: encoder.json has no id for 'ax'"));
  CHECK(has(refused(json, "a b\n\nab c\nab c\n"), "line 4: a line above has the same result: 'ab c'"));
  CHECK(has(refused(json, "a b\nb c\nab c\na bc\n"), "line 4: a line above has the same result: 'a bc'"));
  CHECK(has(refused(json, "ab c\na b\n"), "line 1: the symbol is neither a byte nor the result of a line above: 'ab'"));
}

TEST_CASE("GPT-2's ids of hard texts, and of every character, are those of tiktoken") {
  auto const tokenizer = gpt2();
  if (tokenizer == nullptr) return;
  CHECK(tokenizer->size() == 50257);
  CHECK(tokenizer->end_of_text() == 50256);
  for (auto const& hard : gpt2_cases) {
    INFO(hard.text);
    CHECK(tokenizer->encode(hard.text) == hard.ids);
    CHECK(tokenizer->decode(hard.ids) == hard.text);
  }
  std::string all;
  each_character([&](char32_t code) {
    auto const character = encode_utf8(code);
    all += character + "a " + character + " 1" + character;
  });
  auto const ids = tokenizer->encode(all);
  auto sum = fnv_start;
  for (auto const id : ids) sum = fnv(sum, static_cast<std::uint64_t>(id));
  CHECK(std::ssize(ids) == fsdp::testing::every_character_count);
  CHECK(sum == fsdp::testing::every_character_sum);
}
