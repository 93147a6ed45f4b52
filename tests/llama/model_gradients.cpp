// SPDX-License-Identifier: Apache-2.0
// Gradients of a Llama against finite differences, in double.
//
// links: llama_layers_host
// skip-sanitizers
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "llama/model.hpp"
#include "tests/catch.hpp"
#include "tests/nanogpt/model_support.hpp"
#include "transformer/math/gemm_host.hpp"

namespace {

using Engine = model_test::DirectEngine<double>;
using Llama = llama::Llama<Engine>;

struct Case {
  std::string name;
  llama::LlamaConfig config;
  std::int64_t batch, length;
  llama::DecoderOptions options;
};

/// Two layers of width 12. H, K: heads of `size`.
llama::LlamaConfig shape(std::int64_t layers, std::int64_t heads, std::int64_t kv_heads, std::int64_t size, bool tied) {
  llama::LlamaConfig c;
  c.hidden_size = 12, c.intermediate_size = 10, c.num_hidden_layers = layers;
  c.num_attention_heads = heads, c.num_key_value_heads = kv_heads, c.head_dim = size;
  c.vocab_size = 13, c.max_position_embeddings = 9, c.rope_theta = 100, c.tie_word_embeddings = tied;
  return c;
}

std::vector<Case> cases() {
  llama::DecoderOptions plain;
  llama::DecoderOptions panels;  // several panels, one head at a time, logits in parts of few rows
  panels.panel = 3;
  panels.attention_elements = 1;
  panels.logits_elements = 128 * 4;
  auto recompute = panels, segments = panels, adapters = plain, some = plain;
  recompute.recompute = 2;
  segments.recompute = 4, segments.segment = 2;
  adapters.tuning.lora_rank = 3, adapters.tuning.lora_scale = 0.7f;
  auto adapters_in_segments = segments;
  adapters_in_segments.tuning = some.tuning = adapters.tuning;
  some.tuning.lora_targets = {"k_proj", "o_proj", "up_proj"};
  return {
      {"one panel, tied", shape(2, 4, 2, 4, true), 2, 8, plain},
      {"panels, a head of its own, one key", shape(2, 3, 1, 6, false), 2, 7, panels},
      {"one token", shape(1, 2, 2, 2, true), 3, 1, plain},
      {"recomputed layers", shape(3, 4, 2, 2, false), 2, 7, recompute},
      {"layers recomputed in segments", shape(5, 2, 1, 4, true), 2, 7, segments},
      {"adapters", shape(2, 4, 2, 4, true), 2, 5, adapters},
      {"some adapters", shape(2, 4, 2, 4, false), 2, 5, some},
      {"adapters of layers recomputed in segments", shape(5, 2, 1, 4, false), 2, 5, adapters_in_segments},
  };
}

std::vector<std::int32_t> ids(std::int64_t count, std::int32_t step) {
  std::vector<std::int32_t> values;
  for (std::int32_t i = 0; i < count; ++i) values.push_back((i * step + i * i + 1) % 13);
  return values;
}

}  // namespace

TEST_CASE("every gradient of a Llama is the derivative of the loss", "[llama][gradients]") {
  for (auto const& c : cases()) {
    CAPTURE(c.name);
    Engine engine;
    Llama model(engine, c.config, c.batch, c.length, c.options);
    engine.store().randomise(7, 0.4);
    auto const tokens = ids(c.batch * c.length, 3), targets = ids(c.batch * c.length, 5);
    auto const loss = [&] {
      model.forward_backward(tokens.data(), targets.data());
      return model.read_loss();
    };
    engine.store().forget_gradients();
    loss();
    std::map<std::string, std::vector<double>> gradients;
    for (auto const& [name, entry] : engine.store().tensors) gradients[name] = entry.gradient;
    CHECK(gradients.contains("lm_head.weight") != c.config.tie_word_embeddings);

    for (auto& [name, entry] : engine.store().tensors) {
      CAPTURE(name);
      // Central differences with step 1e-5 err by about 1e-10 for the third derivative and 1e-11 for rounding.
      CHECK(model_test::gradient_error(entry.value, gradients.at(name), loss, 12) < 1e-6);
      // Of one token, attention gives the value: queries and keys have no gradient.
      bool const idle = c.length == 1 && (name.find("q_proj") != name.npos || name.find("k_proj") != name.npos);
      bool const any =
          std::any_of(gradients.at(name).begin(), gradients.at(name).end(), [](double g) { return g != 0; });
      CHECK(any != idle);
    }
  }
}

TEST_CASE("micro-steps of a Llama add their gradients", "[llama][gradients]") {
  Engine engine;
  Llama model(engine, shape(2, 4, 2, 4, false), 2, 5);
  engine.store().randomise(3, 0.3);
  auto const first = ids(10, 3), second = ids(10, 7), targets = ids(10, 5);
  auto const gradients = [&](auto const&... batches) {
    engine.store().forget_gradients();
    (model.forward_backward(batches.data(), targets.data(), 0.5, 8.0), ...);
    model.read_loss();  // waits for the stream
    std::map<std::string, std::vector<double>> all;
    for (auto const& [name, entry] : engine.store().tensors) all[name] = entry.gradient;
    return all;
  };
  auto const one = gradients(first), other = gradients(second), both = gradients(first, second);
  for (auto const& [name, sum] : both) {
    CAPTURE(name);
    double largest = 0;
    for (std::size_t i = 0; i < sum.size(); ++i)
      largest = std::max(largest, std::abs(sum[i] - one.at(name)[i] - other.at(name)[i]));
    CHECK(largest < 1e-12);
  }
}
