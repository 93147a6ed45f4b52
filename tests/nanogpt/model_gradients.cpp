// SPDX-License-Identifier: Apache-2.0
// The gradients of a whole model, tensor by tensor, against central differences in double.
// skip-sanitizers
// optimised

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "nanogpt/model.hpp"
#include "tests/catch.hpp"
#include "tests/nanogpt/model_support.hpp"
#include "tests/support/sanitized.hpp"
#include "transformer/math/gemm_host.hpp"

namespace {

using Engine = model_test::DirectEngine<double>;
using Gpt = nanogpt::Gpt<Engine>;

struct Case {
  std::string name;
  nanogpt::GptConfig config;
  std::int64_t batch, length;
  nanogpt::DecoderOptions options;
};

nanogpt::GptConfig shape(std::int64_t layers, std::int64_t heads, std::int64_t width, std::int64_t block,
                         std::int64_t vocabulary, bool bias, float dropout) {
  return {layers, heads, width, block, vocabulary, dropout, bias};
}

std::vector<Case> cases() {
  nanogpt::DecoderOptions plain;
  nanogpt::DecoderOptions panels;  // several panels, one head at a time, logits in parts of few rows
  panels.panel = 3;
  panels.attention_elements = 1;
  panels.logits_elements = 128 * 4;
  nanogpt::DecoderOptions recompute = panels;
  recompute.recompute = 3;
  auto tanh_gelu = shape(2, 2, 8, 8, 13, true, 0.0f);
  tanh_gelu.activation = nanogpt::Activation::gelu_new;
  nanogpt::DecoderOptions recompute_some = panels;
  recompute_some.recompute = 2;
  nanogpt::DecoderOptions segments = recompute, adapters_in_segments = plain;
  segments.recompute = 5, segments.segment = 2;
  adapters_in_segments.recompute = 4, adapters_in_segments.segment = 3;
  adapters_in_segments.tuning.lora_rank = 3, adapters_in_segments.tuning.lora_scale = 0.7f;
  nanogpt::DecoderOptions adapters = plain, adapters_recomputed = recompute_some;
  adapters.tuning.lora_rank = 3, adapters.tuning.lora_scale = 0.7f;
  adapters_recomputed.tuning = adapters.tuning;
  return {
      {"one panel", shape(2, 2, 8, 8, 13, false, 0.0f), 2, 8, plain},
      {"biases, odd length, several panels", shape(2, 3, 12, 11, 17, true, 0.0f), 2, 7, panels},
      {"one token", shape(1, 2, 8, 4, 5, true, 0.0f), 3, 1, plain},
      {"panels that divide the length", shape(1, 1, 4, 6, 130, false, 0.0f), 1, 6, panels},
      {"dropout", shape(2, 2, 8, 9, 11, true, 0.4f), 2, 7, panels},
      {"recomputed layers", shape(3, 2, 8, 9, 11, true, 0.3f), 2, 7, recompute},
      {"gelu_new", tanh_gelu, 2, 5, plain},
      {"some recomputed layers", shape(3, 2, 8, 9, 11, true, 0.3f), 2, 7, recompute_some},
      {"adapters", shape(2, 2, 8, 8, 13, false, 0.0f), 2, 5, adapters},
      {"adapters of recomputed layers", shape(3, 2, 8, 9, 11, true, 0.3f), 2, 7, adapters_recomputed},
      {"layers recomputed in segments", shape(5, 2, 8, 9, 11, true, 0.3f), 2, 7, segments},
      {"adapters of layers recomputed in segments", shape(4, 2, 8, 9, 11, true, 0.3f), 2, 7, adapters_in_segments},
  };
}

std::vector<std::int32_t> ids(std::int64_t count, std::int64_t vocabulary, std::int32_t step) {
  std::vector<std::int32_t> values;
  for (std::int32_t i = 0; i < count; ++i)
    values.push_back((i * step + i * i + 1) % static_cast<std::int32_t>(vocabulary));
  return values;
}

}  // namespace

// wte is used by embedding and head: its gradient is right only if both add to it.
TEST_CASE("every tensor's gradient is the derivative of the loss", "[nanogpt][model]") {
  for (auto const& c : cases()) {
    CAPTURE(c.name);
    Engine engine;
    Gpt model(engine, c.config, c.batch, c.length, c.options);
    engine.store().randomise(7, 0.3);
    auto const tokens = ids(c.batch * c.length, c.config.vocab_size, 3);
    auto const targets = ids(c.batch * c.length, c.config.vocab_size, 5);

    // The loss comes from the same micro-step, so that the masks are those of its backward.
    auto const loss = [&] {
      model.set_dropout_masks(4);
      model.forward_backward(tokens.data(), targets.data());
      return model.read_loss();
    };
    engine.store().forget_gradients();
    loss();
    std::map<std::string, std::vector<double>> gradients;
    for (auto const& [name, entry] : engine.store().tensors) gradients[name] = entry.gradient;

    for (auto& [name, entry] : engine.store().tensors) {
      CAPTURE(name);
      if (!fsdp::testing::next_cell()) continue;
      // Central differences with step 1e-5 err by about 1e-10 for the third derivative and 1e-11 for rounding.
      CHECK(model_test::gradient_error(entry.value, gradients.at(name), loss) < 1e-6);
      CHECK(std::any_of(gradients.at(name).begin(), gradients.at(name).end(), [](double g) { return g != 0; }));
    }
  }
}

TEST_CASE("micro-steps add their gradients and their weighted losses", "[nanogpt][model]") {
  Engine engine;
  Gpt model(engine, shape(1, 2, 8, 8, 13, true, 0.0f), 2, 5);
  engine.store().randomise(3, 0.3);
  auto const first = ids(10, 13, 3), second = ids(10, 13, 7), targets = ids(10, 13, 5);
  auto const gradient = [&] { return engine.store().at("transformer.wte.weight").gradient; };

  engine.store().forget_gradients();
  model.forward_backward(first.data(), targets.data());
  double const loss_first = model.read_loss();
  auto const gradient_first = gradient();
  engine.store().forget_gradients();
  model.forward_backward(second.data(), targets.data());
  double const loss_second = model.read_loss();
  auto const gradient_second = gradient();

  engine.store().forget_gradients();
  model.forward_backward(first.data(), targets.data(), 0.5, 8.0);
  model.forward_backward(second.data(), targets.data(), 0.5, 8.0);
  CHECK(std::abs(model.read_loss() - 0.5 * (loss_first + loss_second)) < 1e-12);
  CHECK(model.read_loss() == 0.0);
  auto const both = gradient();
  for (std::size_t i = 0; i < both.size(); ++i) {
    CHECK(std::abs(both[i] - 4 * (gradient_first[i] + gradient_second[i])) < 1e-12);
  }
}

// 0 times infinity would be NaN: no loss and no gradient may be computed.
TEST_CASE("a micro-step without targets adds exact zeros to loss and gradients, even where logits overflow",
          "[nanogpt][model]") {
  for (double const gain : {1.0, 1e306}) {
    CAPTURE(gain);
    Engine engine;
    Gpt model(engine, shape(2, 2, 8, 8, 13, true, 0.2f), 2, 5);
    engine.store().randomise(3, 0.3);
    for (auto& value : engine.store().at("transformer.ln_f.weight").value) value = gain;
    for (auto& value : engine.store().at("transformer.wte.weight").value) value *= 1e4;
    auto const tokens = ids(10, 13, 3), targets = ids(10, 13, 5);
    std::vector<std::int32_t> const none(10, -1);
    auto const gradients = [&] {  // of all tensors
      std::vector<double> all;
      for (auto const& [name, entry] : engine.store().tensors)
        all.insert(all.end(), entry.gradient.begin(), entry.gradient.end());
      return all;
    };
    engine.store().forget_gradients();
    model.forward_backward(tokens.data(), none.data(), 0.0);
    CHECK(model.read_loss() == 0.0);
    auto const zero = [](double value) { return value == 0.0; };
    auto const none_yet = gradients();
    CHECK(std::all_of(none_yet.begin(), none_yet.end(), zero));

    engine.store().forget_gradients();
    model.forward_backward(tokens.data(), targets.data(), 0.0);
    auto const loss = model.read_loss();
    if (gain != 1.0) {  // the weight alone does not do it
      CHECK(std::isnan(loss));
      continue;
    }
    CHECK(loss == 0.0);
    model.forward_backward(tokens.data(), targets.data());
    CHECK(model.read_loss() > 0.0);
    auto const before = gradients();
    CHECK_FALSE(std::all_of(before.begin(), before.end(), zero));
    model.forward_backward(tokens.data(), none.data(), 0.0);
    CHECK(model.read_loss() == 0.0);
    CHECK(gradients() == before);
  }
}

TEST_CASE("dropout draws another mask for every micro-step and none in evaluation", "[nanogpt][model]") {
  Engine engine;
  Gpt model(engine, shape(1, 2, 16, 8, 13, false, 0.5f), 2, 8);
  engine.store().randomise(3, 0.5);
  auto const tokens = ids(16, 13, 3), targets = ids(16, 13, 5);
  auto const loss_at = [&](std::uint64_t step) {
    model.set_dropout_masks(step);
    model.forward_backward(tokens.data(), targets.data());
    return model.read_loss();
  };
  CHECK(loss_at(1) == loss_at(1));
  CHECK(loss_at(1) != loss_at(2));
  auto const evaluate = [&] {
    model.evaluate(tokens.data(), targets.data());
    return model.read_evaluation();
  };
  double const clean = evaluate();
  CHECK(clean == evaluate());
  CHECK(clean != loss_at(1));
}

TEST_CASE("a sequence's dropout masks depend on its number, not on the batch that it is part of", "[nanogpt][model]") {
  Engine engine, alone;
  auto const config = shape(2, 2, 16, 8, 13, false, 0.5f);
  Gpt model(engine, config, 2, 8), single(alone, config, 1, 8);
  engine.store().randomise(3, 0.5);
  alone.store().randomise(3, 0.5);
  auto const tokens = ids(16, 13, 3), targets = ids(16, 13, 5);
  model.set_dropout_masks(7, 6);
  model.forward_backward(tokens.data(), targets.data());
  double const together = model.read_loss();
  engine.store().forget_gradients();
  auto const loss_of = [&](std::ptrdiff_t sequence, std::int64_t number) {
    single.set_dropout_masks(7, number);
    single.forward_backward(tokens.data() + 8 * sequence, targets.data() + 8 * sequence);
    return single.read_loss();
  };
  CHECK(std::abs(together - 0.5 * (loss_of(0, 6) + loss_of(1, 7))) < 1e-12);
  CHECK(loss_of(1, 7) != loss_of(1, 6));
}
