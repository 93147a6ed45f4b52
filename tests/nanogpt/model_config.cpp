// SPDX-License-Identifier: Apache-2.0
// Shapes, names and counts of a model, against those that nanoGPT and GPT-2 publish.
// skip-tsan

#include <cstdint>
#include <set>
#include <string>

#include "nanogpt/gpt_config.hpp"
#include "nanogpt/model.hpp"
#include "tests/catch.hpp"
#include "tests/nanogpt/model_support.hpp"
#include "transformer/math/gemm_host.hpp"

namespace {

using nanogpt::GptConfig;

/// Counts what the modules describe.
struct Described {
  nanogpt::ParameterCount decayed, others;
  std::set<std::string> names;
};

Described describe(GptConfig const& config) {
  model_test::DirectEngine<float> engine;
  nanogpt::DecoderOptions options;
  options.training = false;
  nanogpt::Gpt<model_test::DirectEngine<float>> model(engine, config, 1, 1, options);
  Described counts;
  for (auto const& [name, entry] : engine.store().tensors) {
    auto& group = entry.decay ? counts.decayed : counts.others;
    ++group.tensors;
    group.elements += static_cast<std::int64_t>(entry.value.size());
    counts.names.insert(name);
    CHECK(entry.decay == (entry.shape.size() >= 2));
  }
  return counts;
}

}  // namespace

TEST_CASE("the character model has nanoGPT's parameters", "[nanogpt][model][config]") {
  GptConfig const config{6, 6, 384, 256, 65, 0.2f, false};
  CHECK(config.decayed().tensors == 26);
  CHECK(config.decayed().elements == 10'740'096);
  CHECK(config.not_decayed().tensors == 13);
  CHECK(config.not_decayed().elements == 4'992);
  CHECK(config.parameters_without_positions() == 10'646'784);  // "number of parameters: 10.65M"
  CHECK(config.padded_vocab() == 128);
}

TEST_CASE("the GPT-2 sizes have their published parameters", "[nanogpt][model][config]") {
  CHECK(GptConfig{12, 12, 768, 1024, 50257, 0.0f, true}.parameters() == 124'439'808);
  CHECK(GptConfig{24, 16, 1024, 1024, 50257, 0.0f, true}.parameters() == 354'823'168);
  CHECK(GptConfig{36, 20, 1280, 1024, 50257, 0.0f, true}.parameters() == 774'030'080);
  CHECK(GptConfig{48, 25, 1600, 1024, 50257, 0.0f, true}.parameters() == 1'557'611'200);
}

TEST_CASE("counts are those of the tensors that the modules describe", "[nanogpt][model][config]") {
  for (bool const bias : {false, true}) {
    GptConfig const config{3, 2, 16, 8, 21, 0.0f, bias};
    auto const counts = describe(config);
    CHECK(counts.decayed.tensors == config.decayed().tensors);
    CHECK(counts.decayed.elements == config.decayed().elements);
    CHECK(counts.others.tensors == config.not_decayed().tensors);
    CHECK(counts.others.elements == config.not_decayed().elements);
  }
}

TEST_CASE("tensors have the names of GPT-2 checkpoints", "[nanogpt][model][config]") {
  std::set<std::string> expected{"transformer.wte.weight", "transformer.wpe.weight", "transformer.ln_f.weight",
                                 "transformer.ln_f.bias"};
  for (std::string const layer : {"transformer.h.0.", "transformer.h.1."}) {
    for (std::string const part : {"ln_1.", "attn.c_attn.", "attn.c_proj.", "ln_2.", "mlp.c_fc.", "mlp.c_proj."}) {
      expected.insert(layer + part + "weight");
      expected.insert(layer + part + "bias");
    }
  }
  CHECK(describe({2, 2, 8, 8, 13, 0.0f, true}).names == expected);
}

TEST_CASE("FLOP per token follow 6 N + 12 L H Q T", "[nanogpt][model][config]") {
  GptConfig const config{12, 12, 768, 1024, 50304, 0.0f, false};
  CHECK(config.flop_per_token() ==
        6.0 * static_cast<double>(config.parameters() - 1024 * 768) + 12.0 * 12 * 768 * 1024);
}

TEST_CASE("impossible shapes are errors that name the setting", "[nanogpt][model][config]") {
  CHECK_THROWS_AS((GptConfig{2, 3, 16, 8, 13, 0.0f, false}.validate()), fsdp::ConfigError);
  CHECK_THROWS_AS((GptConfig{0, 2, 16, 8, 13, 0.0f, false}.validate()), fsdp::ConfigError);
  CHECK_THROWS_AS((GptConfig{2, 2, 16, 8, 13, 1.0f, false}.validate()), fsdp::ConfigError);
  model_test::DirectEngine<float> engine;
  using Model = nanogpt::Gpt<model_test::DirectEngine<float>>;
  CHECK_THROWS_AS(Model(engine, {2, 2, 16, 8, 13, 0.0f, false}, 1, 9), fsdp::ConfigError);
  CHECK_NOTHROW(GptConfig{}.validate());
}

TEST_CASE("a model's memory is allocated once and given back", "[nanogpt][model][config]") {
  model_test::DirectEngine<float> engine;
  {
    nanogpt::Gpt<model_test::DirectEngine<float>> model(engine, {2, 2, 16, 8, 13, 0.1f, true}, 2, 8);
    auto const reserved = engine.account().reserved_total();
    CHECK(engine.account().reserved(fsdp::MemoryTag::activations) > 0);
    std::vector<std::int32_t> const ids(16, 1);
    for (int step = 0; step < 3; ++step) model.forward_backward(ids.data(), ids.data());
    model.evaluate(ids.data(), ids.data());
    model.logits(ids.data(), 3);
    CHECK(engine.account().reserved_total() == reserved);
  }
  CHECK(engine.account().reserved_total() == 0);
  CHECK(engine.account().live(fsdp::MemoryTag::activations) == 0);
}
