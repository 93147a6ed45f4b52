// SPDX-License-Identifier: Apache-2.0
// The words of Llama 3 and of GPT-2 with single digits, against those of HuggingFace's library.
// skip-sanitizers
//
// links: transformer_data
// optimised
#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "tests/catch.hpp"
#include "tests/transformer/token_sums.hpp"
#include "tests/transformer/tokenizer_cases.hpp"
#include "transformer/tokenizer/utf8.hpp"
#include "transformer/tokenizer/words.hpp"

namespace {

using namespace transformer;

std::vector<std::size_t> ends_of_words(std::string_view text, WordPattern pattern) {
  std::vector<std::size_t> ends;
  WordScanner words(text, pattern);
  for (std::size_t begin = 0; begin < text.size(); begin = ends.back()) ends.push_back(words.end_of_word(begin));
  return ends;
}

bool is_left_out(char32_t code) {
  auto const& newer = fsdp::testing::newer_numbers;
  return (code >= 0xd800 && code < 0xe000) || std::find(newer.begin(), newer.end(), code) != newer.end();
}

std::uint64_t sum_of_every_character(WordPattern pattern) {
  fsdp::testing::Fnv sum;
  for (char32_t first = 0; first < 0x110000; first += 4096) {
    std::string text;
    for (auto code = first; code < first + 4096; ++code) {
      if (is_left_out(code)) continue;
      auto const c = encode_utf8(code);
      text += c + "a " + c + " 1" + c + "'" + c + "x\r" + c + "\n";
    }
    for (auto const end : ends_of_words(text, pattern)) sum.add(end);
  }
  return sum.sum();
}

}  // namespace

TEST_CASE("words around every character are those of the regular expressions") {
  CHECK(sum_of_every_character(WordPattern::llama3) == fsdp::testing::llama3_word_sum);
  CHECK(sum_of_every_character(WordPattern::gpt2_digits) == fsdp::testing::digits_word_sum);
}

TEST_CASE("three numbers at most are a word of Llama 3, and one of SmolLM") {
  CHECK(ends_of_words("1234567 a12", WordPattern::llama3) == std::vector<std::size_t>{3, 6, 7, 9, 11});
  CHECK(ends_of_words("123 a12", WordPattern::gpt2_digits) == std::vector<std::size_t>{1, 2, 3, 5, 6, 7});
}

TEST_CASE("words of a text that is cut at a sure place are those of the whole, for each pattern") {
  std::vector<std::string> const alphabet{"'",        "s",
                                          "R",        "e",
                                          " ",        " ",
                                          "\n",       "\r",
                                          "1",        "22",
                                          "!",        "\t",
                                          "\xc2\xa0", "\xe4\xb8\xad",
                                          "\xc2\xbd", "\xe4",
                                          "\xb8",     "\xf0\x9f\x98\x80",
                                          "\xc5\xbf", "\xff"};
  std::mt19937 draw(3);
  for (auto const pattern : {WordPattern::gpt2, WordPattern::gpt2_digits, WordPattern::llama3}) {
    std::int64_t sure = 0;
    for (int round = 0; round < 3000; ++round) {
      std::string text;
      for (int i = 0; i < 12; ++i) text += alphabet[draw() % alphabet.size()];
      auto const whole = ends_of_words(text, pattern);
      auto const cut_gives_same = [&](std::size_t cut) {
        auto parts = ends_of_words(std::string_view(text).substr(0, cut), pattern);
        for (auto const end : ends_of_words(std::string_view(text).substr(cut), pattern)) parts.push_back(cut + end);
        return parts == whole;
      };
      for (std::size_t known = 1; known <= text.size(); ++known) {
        auto const cut = last_sure_cut(std::string_view(text).substr(0, known), pattern);
        if (cut == 0) continue;
        ++sure;
        if (!cut_gives_same(cut)) FAIL("'" << text << "' at " << cut);
      }
    }
    CHECK(sure > 10'000);
  }
  CHECK(is_sure_cut("the game", 3, WordPattern::llama3));
  CHECK(is_sure_cut("a12", 1, WordPattern::llama3));
  CHECK(is_sure_cut(" 12", 2, WordPattern::gpt2_digits));
}
