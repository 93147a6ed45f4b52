// SPDX-License-Identifier: Apache-2.0
// Decoding with cached keys and values, evaluation, and vocabularies that are padded.
// links: transformer_data
// skip-tsan

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "nanogpt/model.hpp"
#include "tests/catch.hpp"
#include "tests/nanogpt/model_support.hpp"
#include "transformer/math/gemm_host.hpp"
#include "transformer/sampling/continuation.hpp"
#include "transformer/sampling/next_token.hpp"

namespace {

using Engine = model_test::DirectEngine<double>;
using Gpt = nanogpt::Gpt<Engine>;

nanogpt::GptConfig small_config() { return {2, 2, 8, 12, 19, 0.3f, true}; }

std::vector<std::int32_t> text(std::int64_t count, std::int32_t step = 7) {
  std::vector<std::int32_t> ids;
  for (std::int32_t i = 0; i < count; ++i) ids.push_back((i * step + 3) % 19);
  return ids;
}

double largest_difference(std::vector<float> const& a, std::vector<float> const& b) {
  REQUIRE(a.size() == b.size());
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    largest = std::max(largest, std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i])));
  return largest;
}

constexpr transformer::DrawOptions greedy{.temperature = 0}, random_draws{.temperature = 0.8, .top_k = 12};

/// A text continued to `length` tokens by a loop that keeps nothing: the model reads the last tokens again each time.
template <class Model>
std::vector<std::int32_t> continued_plainly(Model& model, std::vector<std::int32_t> text, std::size_t length,
                                            transformer::DrawOptions const& options) {
  std::mt19937_64 random(41);
  while (text.size() < length) {
    auto const count = std::min(static_cast<std::int64_t>(text.size()), model.capacity());
    auto const logits = model.logits(text.data() + static_cast<std::int64_t>(text.size()) - count, count);
    text.push_back(transformer::draw_token(logits, options, random));
  }
  return text;
}

template <class Model>
std::vector<std::int32_t> continued(Model& model, std::vector<std::int32_t> text, std::size_t length,
                                    transformer::DrawOptions const& options) {
  std::mt19937_64 random(41);
  auto whole = text;
  transformer::continue_text(model, text, static_cast<std::int64_t>(length - text.size()),
                             [&](std::vector<float> const& logits) -> std::optional<std::int32_t> {
                               whole.push_back(transformer::draw_token(logits, options, random));
                               return whole.back();
                             });
  return whole;
}

}  // namespace

TEST_CASE("a text three times the block has the tokens of a loop without a cache", "[nanogpt][model][decode]") {
  auto const check = [](auto engine) {
    nanogpt::DecoderOptions options;
    options.training = false;
    nanogpt::Gpt model(*engine, small_config(), 1, 12, options);
    engine->store().randomise(43, 0.4);
    for (auto const& draws : {greedy, random_draws}) {
      for (std::int64_t const start : {1, 5, 12, 13, 30}) {
        CAPTURE(start, draws.temperature);
        CHECK(continued(model, text(start), 42, draws) == continued_plainly(model, text(start), 42, draws));
      }
    }
  };
  check(std::make_unique<model_test::DirectEngine<double>>());
  check(std::make_unique<model_test::DirectEngine<float>>());
}

TEST_CASE("within the block a token is read once, and a text ends where the choice says", "[nanogpt][model][decode]") {
  struct Counter {
    std::int64_t cached_ = 0;
    std::vector<std::int64_t> read{};
    std::int64_t capacity() const { return 4; }
    std::int64_t cached() const { return cached_; }
    void restart() { cached_ = 0; }
    std::vector<float> extend(std::int32_t const*, std::int64_t count) {
      cached_ += count;
      read.push_back(count);
      return {0};
    }
  };
  Counter model;
  auto const zero = [](std::vector<float> const&) { return std::optional<std::int32_t>(0); };
  transformer::continue_text(model, {0, 0}, 5, zero);
  CHECK(model.read == std::vector<std::int64_t>{2, 1, 1, 4, 4});
  model = {};
  transformer::continue_text(model, {0, 0, 0, 0, 0}, 5, [&](auto const&) {
    return model.read.size() < 3 ? std::optional<std::int32_t>(0) : std::nullopt;
  });
  CHECK(model.read == std::vector<std::int64_t>{4, 4, 4});
}

TEST_CASE("decoding token by token equals computing the whole text", "[nanogpt][model][decode]") {
  for (bool const training : {true, false}) {
    CAPTURE(training);
    Engine engine;
    nanogpt::DecoderOptions options;
    options.training = training;
    options.panel = 4;
    Gpt model(engine, small_config(), training ? 3 : 1, 11, options);
    engine.store().randomise(23, 0.4);
    auto const ids = text(11);

    model.restart();
    std::vector<std::vector<float>> stepwise{model.extend(ids.data(), 4)};  // prefill, then one at a time
    for (std::int64_t i = 4; i < 11; ++i) stepwise.push_back(model.extend(&ids[static_cast<std::size_t>(i)], 1));
    CHECK(model.cached() == 11);
    CHECK_THROWS_AS(model.extend(ids.data(), 1), fsdp::UsageError);

    for (std::int64_t length = 4; length <= 11; ++length) {
      auto const whole = model.logits(ids.data(), length);
      // fp64 throughout, rounded to fp32 at the end: at most one unit in the last place apart.
      CHECK(largest_difference(whole, stepwise[static_cast<std::size_t>(length - 4)]) < 1e-6);
    }
  }
}

TEST_CASE("recomputed layers keep no text to go on from", "[nanogpt][model][decode]") {
  auto const ids = text(8);
  std::vector<float> expected;
  for (std::int64_t const recompute : {0, 1, 2}) {
    CAPTURE(recompute);
    Engine engine;
    nanogpt::DecoderOptions options;
    options.recompute = recompute;
    Gpt model(engine, small_config(), 1, 8, options);
    engine.store().randomise(23, 0.4);
    if (expected.empty()) expected = model.logits(ids.data(), 8);
    CHECK(model.logits(ids.data(), 8) == expected);
    model.logits(ids.data(), 7);
    if (recompute < 2) {
      CHECK(largest_difference(model.extend(&ids[7], 1), expected) < 1e-6);
    } else {
      CHECK_THROWS_AS(model.extend(&ids[7], 1), fsdp::UsageError);
    }
    CHECK(model.logits(ids.data(), 8) == expected);
  }
}

TEST_CASE("layers in one segment keep a text to go on from, layers in two do not", "[nanogpt][model][decode]") {
  auto const ids = text(8);
  auto config = small_config();
  config.n_layer = 3;
  for (std::int64_t const segment : {1, 2, 3}) {
    CAPTURE(segment);
    Engine engine;
    nanogpt::DecoderOptions options;
    options.recompute = 3;
    options.segment = segment;
    Gpt model(engine, config, 1, 8, options);
    engine.store().randomise(23, 0.4);
    auto const expected = model.logits(ids.data(), 8);
    model.logits(ids.data(), 7);
    if (segment < 3)
      CHECK_THROWS_AS(model.extend(&ids[7], 1), fsdp::UsageError);
    else
      CHECK(largest_difference(model.extend(&ids[7], 1), expected) < 1e-6);
    CHECK(model.logits(ids.data(), 8) == expected);
  }
}

TEST_CASE("logits give the loss that evaluation gives", "[nanogpt][model][decode]") {
  Engine engine;
  nanogpt::DecoderOptions options;
  options.training = false;
  Gpt model(engine, small_config(), 2, 5, options);
  engine.store().randomise(29, 0.4);
  auto const tokens = text(10), targets = text(10, 5);
  double expected = 0;
  for (std::size_t row = 0; row < 2; ++row) {
    for (std::size_t t = 0; t < 5; ++t) {
      auto const logits = model.logits(&tokens[row * 5], static_cast<std::int64_t>(t) + 1);
      double sum = 0;
      for (auto const logit : logits) sum += std::exp(static_cast<double>(logit));
      expected += std::log(sum) - static_cast<double>(logits[static_cast<std::size_t>(targets[row * 5 + t])]);
    }
  }
  model.evaluate(tokens.data(), targets.data());
  model.evaluate(tokens.data(), targets.data());
  CHECK(std::abs(model.read_evaluation() - expected / 10) < 1e-6);
  CHECK(model.read_evaluation() == 0.0);
  CHECK_THROWS_AS(model.forward_backward(tokens.data(), targets.data()), fsdp::UsageError);
}

TEST_CASE("columns beyond the vocabulary take no part", "[nanogpt][model][decode]") {
  // All logits equal: the loss is log V with V the true vocabulary, whatever the rows are padded to. In the scratch
  // behind the logits lies whatever a former pass left.
  for (std::int64_t const vocabulary : {1, 65, 127, 128, 129}) {
    CAPTURE(vocabulary);
    Engine engine;
    Gpt model(engine, {1, 1, 4, 4, vocabulary, 0.0f, false}, 1, 4);
    CHECK(model.config().padded_vocab() % 128 == 0);
    std::vector<std::int32_t> const zeros(4, 0);
    engine.store().randomise(31, 0.0);
    model.forward_backward(zeros.data(), zeros.data());
    CHECK(std::abs(model.read_loss() - std::log(static_cast<double>(vocabulary))) < 1e-12);
    model.evaluate(zeros.data(), zeros.data());
    CHECK(std::abs(model.read_evaluation() - std::log(static_cast<double>(vocabulary))) < 1e-12);
    CHECK(engine.store().at("transformer.wte.weight").shape == std::vector<std::int64_t>{vocabulary, 4});
    CHECK(model.logits(zeros.data(), 2).size() == static_cast<std::size_t>(vocabulary));
  }
}

TEST_CASE("the caller's token buffers are free once a call returns", "[nanogpt][model][decode]") {
  Engine engine;
  Gpt model(engine, {1, 2, 8, 12, 19, 0.0f, true}, 1, 8);
  engine.store().randomise(37, 0.4);
  std::vector<double> expected;
  for (std::int32_t step = 1; step <= 6; ++step) {
    auto const tokens = text(8, step), targets = text(8, step + 1);
    model.evaluate(tokens.data(), targets.data());
    expected.push_back(model.read_evaluation());
  }
  double sum = 0;
  for (auto const loss : expected) sum += loss;
  std::vector<std::int32_t> tokens, targets;
  for (std::int32_t step = 1; step <= 6; ++step) {  // without a wait in between, from buffers that are overwritten
    tokens = text(8, step);
    targets = text(8, step + 1);
    model.evaluate(tokens.data(), targets.data());
    tokens.assign(8, 0);
    targets.assign(8, 0);
  }
  CHECK(std::abs(model.read_evaluation() - sum / 6) < 1e-14);
}
