// SPDX-License-Identifier: Apache-2.0
// The choice of a token from logits, and tokens as text that is printed while it grows.
// links: transformer_data
// skip-tsan

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tests/catch.hpp"
#include "tests/support/messages.hpp"
#include "transformer/sampling/next_token.hpp"
#include "transformer/tokenizer/text_stream.hpp"

namespace {

using namespace transformer;
using fsdp::testing::has;
using fsdp::testing::what;

/// Logits of these probabilities.
std::vector<float> logits_of(std::vector<double> const& probabilities) {
  std::vector<float> logits;
  for (auto const probability : probabilities) logits.push_back(static_cast<float>(std::log(probability)) + 3.0f);
  return logits;
}

std::vector<int> counts(std::vector<float> const& logits, DrawOptions const& options, int draws = 20000) {
  std::mt19937_64 random(5);
  std::vector<int> drawn(logits.size());
  for (int i = 0; i < draws; ++i) ++drawn[static_cast<std::size_t>(draw_token(logits, options, random))];
  return drawn;
}

/// The tokens that are drawn at all.
std::set<int> support(std::vector<float> const& logits, DrawOptions const& options) {
  auto const drawn = counts(logits, options, 2000);
  std::set<int> ids;
  for (std::size_t id = 0; id < drawn.size(); ++id)
    if (drawn[id] > 0) ids.insert(static_cast<int>(id));
  return ids;
}

/// Each frequency within five standard deviations of its probability.
void check_frequencies(std::vector<int> const& drawn, std::vector<double> const& probabilities) {
  double draws = 0;
  for (int const count : drawn) draws += count;
  for (std::size_t id = 0; id < drawn.size(); ++id) {
    CAPTURE(id, drawn[id], probabilities[id]);
    double const deviation = std::sqrt(draws * probabilities[id] * (1 - probabilities[id]));
    CHECK(std::abs(drawn[id] - draws * probabilities[id]) <= 5 * deviation);
  }
}

/// Tokens are bytes.
struct Bytes final : Tokenizer {
  std::int64_t size() const override { return 256; }
  std::optional<std::int64_t> end_of_text() const override { return std::nullopt; }
  void append(std::string_view text, std::vector<std::int64_t>& ids, WordCache&) const override {
    for (char const byte : text) ids.push_back(static_cast<unsigned char>(byte));
  }
  std::string decode(std::span<std::int64_t const> ids) const override {
    std::string text;
    for (auto const id : ids) text += static_cast<char>(static_cast<unsigned char>(checked(id)));
    return text;
  }
  std::size_t last_cut(std::string_view text) const override { return text.size(); }
};

/// Text printed after each byte, and at the end.
std::vector<std::string> pieces(std::string_view text) {
  Bytes const tokenizer;
  TextStream stream(tokenizer);
  std::vector<std::string> printed;
  for (auto const id : tokenizer.encode(text)) printed.push_back(stream.add(id));
  printed.push_back(stream.end());
  return printed;
}
using Pieces = std::vector<std::string>;

}  // namespace

TEST_CASE("tokens are drawn with the probabilities of the logits over the temperature") {
  std::vector<double> const probabilities{0.1, 0.4, 0.2, 0.3};
  check_frequencies(counts(logits_of(probabilities), {}), probabilities);
  std::vector<double> sharper;
  for (auto const probability : probabilities) sharper.push_back(probability * probability / 0.30);
  check_frequencies(counts(logits_of(probabilities), {.temperature = 0.5}), sharper);
  check_frequencies(counts(logits_of(probabilities), {.top_k = 2}), {0, 4.0 / 7, 0, 3.0 / 7});
  check_frequencies(counts(logits_of(probabilities), {.top_p = 0.8}), {0, 4.0 / 9, 2.0 / 9, 3.0 / 9});
}

TEST_CASE("top_k keeps the k most likely tokens, and those that are as likely as the k-th") {
  auto const logits = logits_of({0.1, 0.3, 0.1, 0.4, 0.1});
  CHECK(support(logits, {.top_k = 1}) == std::set{3});
  CHECK(support(logits, {.top_k = 2}) == std::set{1, 3});
  CHECK(support(logits, {.top_k = 3}) == std::set{0, 1, 2, 3, 4});
  CHECK(support(logits, {.top_k = 5}).size() == 5);
  CHECK(support(logits, {.top_k = 1000}).size() == 5);
}

TEST_CASE("top_p keeps the fewest tokens that make it up, after temperature and top_k") {
  auto const logits = logits_of({0.15, 0.5, 0.05, 0.3});
  CHECK(support(logits, {.top_p = 1e-9}) == std::set{1});
  CHECK(support(logits, {.top_p = 0.49}) == std::set{1});
  CHECK(support(logits, {.top_p = 0.51}) == std::set{1, 3});
  CHECK(support(logits, {.top_p = 0.79}) == std::set{1, 3});
  CHECK(support(logits, {.top_p = 0.81}) == std::set{0, 1, 3});
  CHECK(support(logits, {.top_p = 0.96}).size() == 4);
  CHECK(support(logits, {.top_k = 2, .top_p = 0.6}) == std::set{1});           // 5/8 of what top_k leaves
  CHECK(support(logits, {.temperature = 0.5, .top_p = 0.65}) == std::set{1});  // 0.25 of 0.365
  CHECK(support(logits_of({0.25, 0.25, 0.25, 0.25}), {.top_p = 0.6}) == std::set{0, 1, 2});
}

TEST_CASE("temperature 0 takes the most likely token, the first of several, and no random number") {
  std::mt19937_64 random(5);
  auto const before = random;
  CHECK(draw_token(std::vector<float>{1, 3, 2, 3}, {.temperature = 0}, random) == 1);
  CHECK(draw_token(std::vector<float>{-7}, {.temperature = 0}, random) == 0);
  CHECK(random == before);
}

TEST_CASE("the largest logits and the smallest temperatures are drawn from") {
  constexpr float most = std::numeric_limits<float>::max();
  CHECK(support({-most, most, 0, -most}, {}) == std::set{1});
  CHECK(support({1, 1 + 1e-6f, 0}, {.temperature = std::numeric_limits<double>::denorm_min()}) == std::set{1});
  CHECK(support({1, 1 + 1e-6f, 0}, {.temperature = 1e308}).size() == 3);
  CHECK(support({2, 2}, {.temperature = 1e-300, .top_p = 0.5}) == std::set{0});
}

TEST_CASE("a logit that is not finite is an error that names its token, at any temperature") {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  for (double const temperature : {0.0, 1.0}) {
    for (float const bad : {infinity, -infinity, std::nanf("")}) {
      std::mt19937_64 random(5);
      auto const message = what([&] {
        draw_token(std::vector<float>{1, 2, bad, bad}, {.temperature = temperature}, random);
      });
      CHECK(has(message, "the model's logit of token 2 is "));
      CHECK(has(message, std::isnan(bad) ? "nan" : "inf"));
    }
  }
}

TEST_CASE("characters are printed when they are whole") {
  CHECK(pieces("ab") == Pieces{"a", "b", ""});
  CHECK(pieces("aé€😀b") == Pieces{"a", "", "é", "", "", "€", "", "", "", "😀", "b", ""});
}

TEST_CASE("bytes that are no character are printed as soon as none can become of them, or at the end") {
  CHECK(pieces("\xff") == Pieces{"\xff", ""});
  CHECK(pieces("\xe2\x82") == Pieces{"", "", "\xe2\x82"});
  CHECK(pieces("\xe2z") == Pieces{"", "\xe2z", ""});
  CHECK(pieces("\xe2\xe2\x82\xac") == Pieces{"", "\xe2", "", "€", ""});
  CHECK(pieces("\x82\x82") == Pieces{"\x82", "\x82", ""});
}

TEST_CASE("whatever the bytes, all are printed in their order, and at most three are held back") {
  std::mt19937 random(3);
  std::string_view constexpr likely = "a\x80\xbf\xc2\xe0\xe2\x82\xac\xf0\x9f\x98\xff";
  Bytes const tokenizer;
  TextStream stream(tokenizer);
  for (int round = 0; round < 200; ++round) {
    std::string text, printed;
    std::size_t held = 0;
    for (int i = 0; i < 20; ++i) {
      text += likely[random() % likely.size()];
      printed += stream.add(static_cast<unsigned char>(text.back()));
      held = std::max(held, text.size() - printed.size());
    }
    printed += stream.end();
    CHECK(printed == text);
    CHECK(held <= 3);
  }
}
