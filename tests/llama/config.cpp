// SPDX-License-Identifier: Apache-2.0
// Shapes and counts of Llamas, and HuggingFace's config.json of them: what is read, written and refused.
//
// links: llama_models
// skip-tsan
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "llama/formats/config_json.hpp"
#include "llama/llama_config.hpp"
#include "tests/catch.hpp"

using llama::LlamaConfig;
using Json = nlohmann::ordered_json;
using Kind = transformer::RopeScaling::Kind;

namespace {

/// CodeLlama-7B's, as transformers 4 wrote it: neither head_dim nor any field that came later.
Json code_llama() {
  return {{"architectures", {"LlamaForCausalLM"}},
          {"bos_token_id", 1},
          {"eos_token_id", 2},
          {"hidden_act", "silu"},
          {"hidden_size", 4096},
          {"initializer_range", 0.02},
          {"intermediate_size", 11008},
          {"max_position_embeddings", 16384},
          {"model_type", "llama"},
          {"num_attention_heads", 32},
          {"num_hidden_layers", 32},
          {"num_key_value_heads", 32},
          {"pretraining_tp", 1},
          {"rms_norm_eps", 1e-05},
          {"rope_scaling", nullptr},
          {"rope_theta", 1000000},
          {"tie_word_embeddings", false},
          {"torch_dtype", "bfloat16"},
          {"use_cache", true},
          {"vocab_size", 32016}};
}

/// code_llama with fields of its own.
Json with(Json const& fields) {
  auto json = code_llama();
  json.update(fields);
  return json;
}
Json without(char const* field) {
  auto json = code_llama();
  json.erase(field);
  return json;
}

LlamaConfig parsed(Json const& json) { return llama::parse_huggingface_config(json.dump(), "'config.json'"); }

/// The error of reading it; "" if there is none.
std::string refusal(Json const& json) {
  try {
    parsed(json);
  } catch (fsdp::ConfigError const& error) {
    return error.what();
  }
  return "";
}

Json const llama3{{"factor", 8.0},
                  {"low_freq_factor", 1.0},
                  {"high_freq_factor", 4.0},
                  {"original_max_position_embeddings", 8192},
                  {"rope_type", "llama3"}};

Json changed(Json json, Json const& fields) {
  json.update(fields);
  return json;
}

}  // namespace

TEST_CASE("the published sizes have their parameters", "[llama][config]") {
  LlamaConfig const code_llama_7b;
  CHECK(code_llama_7b.parameters() == 6'738'546'688);
  CHECK(code_llama_7b.layer_parameters() == 202'383'360);
  CHECK(code_llama_7b.padded_vocab() == 32128);
  LlamaConfig llama_2_7b;
  llama_2_7b.vocab_size = 32000;
  CHECK(llama_2_7b.parameters() == 6'738'415'616);
  LlamaConfig llama_2_70b{8192, 28672, 80, 64, 8, 128, 32000};
  CHECK(llama_2_70b.parameters() == 68'976'648'192);
  LlamaConfig llama_3_2_1b{2048, 8192, 16, 32, 8, 64, 128256};
  llama_3_2_1b.tie_word_embeddings = true;
  CHECK(llama_3_2_1b.parameters() == 1'235'814'400);
  LlamaConfig smol_135m{576, 1536, 30, 9, 3, 64, 49152};
  smol_135m.tie_word_embeddings = true;
  CHECK(smol_135m.parameters() == 134'515'008);
}

TEST_CASE("FLOP per token follow 6 N + 12 L H Q T, without an embedding that only is looked up", "[llama][config]") {
  LlamaConfig config;
  double const attention = 12.0 * 32 * 4096 * 1024;
  CHECK(config.flop_per_token(1024) == 6.0 * static_cast<double>(config.parameters() - 32016 * 4096) + attention);
  config.tie_word_embeddings = true;
  CHECK(config.flop_per_token(1024) == 6.0 * static_cast<double>(config.parameters()) + attention);
}

TEST_CASE("a config.json of transformers 4 is read", "[llama][config]") {
  CHECK(parsed(code_llama()) == LlamaConfig{});
  CHECK(parsed(without("num_key_value_heads")) == LlamaConfig{});
  CHECK(parsed(with({{"num_key_value_heads", nullptr}, {"head_dim", nullptr}, {"mlp_bias", false}})) == LlamaConfig{});
  // Values that transformers takes for missing fields.
  CHECK(parsed(without("rms_norm_eps")).rms_norm_eps == 1e-6);
  CHECK(parsed(without("rope_theta")).rope_theta == 10000.0);
  CHECK_FALSE(parsed(without("tie_word_embeddings")).tie_word_embeddings);
  auto const other = parsed(with({{"head_dim", 64}, {"num_key_value_heads", 8}, {"tie_word_embeddings", true}}));
  CHECK(other.head_dim == 64);
  CHECK(other.num_key_value_heads == 8);
  CHECK(other.tie_word_embeddings);
}

TEST_CASE("rotary embeddings are read by the old names and the new ones", "[llama][config]") {
  auto const expect = [](Json const& json, double theta, transformer::RopeScaling const& scaling) {
    CAPTURE(json.dump());
    auto const config = parsed(json);
    CHECK(config.rope_theta == theta);
    CHECK(config.rope_scaling == scaling);
  };
  transformer::RopeScaling const linear{.kind = Kind::linear, .factor = 4.0};
  expect(with({{"rope_scaling", {{"type", "linear"}, {"factor", 4}}}}), 1e6, linear);
  expect(with({{"rope_scaling", {{"rope_type", "linear"}, {"type", "linear"}, {"factor", 4.0}}}}), 1e6, linear);
  expect(with({{"rope_scaling", {{"rope_type", "default"}}}}), 1e6, {});
  expect(with({{"rope_scaling", Json::object()}}), 1e6, {});
  expect(with({{"rope_scaling", llama3}}), 1e6, {Kind::llama3, 8.0, 1.0, 4.0, 8192});
  auto fresh = without("rope_theta");
  fresh.erase("rope_scaling");
  fresh["rope_parameters"] = {{"rope_theta", 500000.0}, {"rope_type", "default"}};
  expect(fresh, 5e5, {});
  fresh["rope_parameters"] = {{"rope_theta", 500000.0}};  // without a type
  expect(fresh, 5e5, {});
  fresh["rope_parameters"] = changed(llama3, {{"rope_theta", 500000.0}});
  expect(fresh, 5e5, {Kind::llama3, 8.0, 1.0, 4.0, 8192});
}

TEST_CASE("a sliding window limits the sequences in which a mistral is a Llama", "[llama][config]") {
  CHECK(parsed(with({{"model_type", "mistral"}, {"sliding_window", nullptr}})) == LlamaConfig{});
  auto const windowed =
      parsed(with({{"model_type", "mistral"}, {"sliding_window", 4096}, {"layer_types", {"sliding_attention"}}}));
  CHECK(windowed.sliding_window == 4096);
  CHECK(windowed.longest_sequence() == 4096);
  CHECK(windowed.longest_sequence_name() == "sliding_window");
  CHECK(parsed(with({{"model_type", "mistral"}})) == windowed);  // transformers' default
  auto const wide = parsed(with({{"model_type", "mistral"}, {"sliding_window", 16384}}));
  CHECK(wide.longest_sequence() == 16384);
  CHECK(wide.longest_sequence_name() == "max_position_embeddings");
  CHECK(LlamaConfig{}.longest_sequence() == 16384);
  // transformers would take 8 heads of keys.
  auto fewer = with({{"model_type", "mistral"}, {"sliding_window", nullptr}});
  fewer.erase("num_key_value_heads");
  CHECK(refusal(fewer) == "'config.json': 'num_key_value_heads' is missing");
}

TEST_CASE("each key of a config.json is read, known to have no effect, or named in a refusal", "[llama][config]") {
  // LlamaConfig().to_dict() of transformers 4.57 has these keys; values other than null and false are its own.
  CHECK(parsed(with({{"_name_or_path", "m"},
                     {"chunk_size_feed_forward", 0},
                     {"do_sample", false},
                     {"early_stopping", false},
                     {"id2label", {{"0", "LABEL_0"}}},
                     {"length_penalty", 1.0},
                     {"max_length", 20},
                     {"min_length", 0},
                     {"num_beams", 1},
                     {"pruned_heads", Json::object()},
                     {"return_dict", true},
                     {"temperature", 1.0},
                     {"tokenizer_class", nullptr},
                     {"top_k", 50},
                     {"is_encoder_decoder", false},
                     {"transformers_version", "4.57.6"}})) == LlamaConfig{});
  CHECK(parsed(with({{"a_key_to_come", nullptr}})) == LlamaConfig{});
  std::string const unknown = "expected supported keys only (remove this one if the model does not need it), got ";
  CHECK(refusal(with({{"a_key_to_come", false}})) == "'config.json': 'a_key_to_come': " + unknown + "false");
  CHECK(refusal(with({{"num_local_experts", 8}})) == "'config.json': 'num_local_experts': " + unknown + "8");
  CHECK(refusal(with({{"rope_scaling", {{"type", "linear"}, {"factor", 2.0}, {"beta_fast", 32}}}})) ==
        "'config.json': 'rope_scaling': 'beta_fast': " + unknown + "32");
  CHECK(refusal(with({{"auto_map", {{"AutoModelForCausalLM", "m.M"}}}})) ==
        "'config.json': 'auto_map': expected none, got {\"AutoModelForCausalLM\":\"m.M\"}");
}

TEST_CASE("what would be computed otherwise is refused, with its field", "[llama][config]") {
  std::vector<std::pair<Json, std::string>> const cases{
      {{{"model_type", "gpt2"}}, "'model_type': expected \"llama\" or \"mistral\", got \"gpt2\""},
      {{{"attention_bias", true}}, "'attention_bias': expected false, the only value that is supported, got true"},
      {{{"mlp_bias", true}}, "'mlp_bias': expected false, the only value that is supported, got true"},
      {{{"hidden_act", "gelu"}}, "'hidden_act': expected \"silu\", the only value that is supported, got \"gelu\""},
      {{{"attention_dropout", 0.1}}, "'attention_dropout': expected 0.0, the only value that is supported, got 0.1"},
      {{{"sliding_window", 0}}, "'sliding_window': expected a whole number from 1 to 1000000000, got 0"},
      {{{"layer_types", {"full_attention", "sliding_attention"}}},
       "'layer_types': expected full_attention alone, or sliding_attention with a sliding_window, got "
       "[\"full_attention\",\"sliding_attention\"]"},
      {{{"quantization_config", {{"bits", 4}}}}, "'quantization_config': expected none, got {\"bits\":4}"},
      {{{"partial_rotary_factor", 0.5}},
       "'partial_rotary_factor': expected 1.0, the only value that is supported, got 0.5"},
      {{{"num_key_value_heads", 5}}, "'num_key_value_heads': expected a divisor of num_attention_heads 32, got 5"},
      {{{"num_attention_heads", 30}}, "'num_attention_heads': expected a divisor of hidden_size 4096, got 30"},
      {{{"num_attention_heads", 5000}}, "'num_attention_heads': expected a divisor of hidden_size 4096, got 5000"},
      {{{"num_attention_heads", 30}, {"num_key_value_heads", 10}, {"head_dim", 64}},
       "'num_attention_heads': expected a divisor of hidden_size 4096, got 30"},
      {{{"head_dim", 33}}, "'head_dim': expected an even number, got 33"},
      {{{"head_dim", 2000}}, "'head_dim': expected a whole number from 1 to 1000, got 2000"},
      {{{"hidden_size", 0}}, "'hidden_size': expected a whole number from 1 to 1000000000, got 0"},
      {{{"hidden_size", 4096.5}}, "'hidden_size': expected a whole number from 1 to 1000000000, got 4096.5"},
      {{{"hidden_size", 32000000}}, "'hidden_size': expected a whole number from 1 to 1000000, got 32000000"},
      {{{"num_hidden_layers", "32"}}, "'num_hidden_layers': expected a whole number from 1 to 1000000000, got \"32\""},
      {{{"vocab_size", 1e30}}, "'vocab_size': expected a whole number from 1 to 1000000000, got 1e+30"},
      {{{"eos_token_id", 32016}}, "'eos_token_id': expected ids of the vocabulary, from 0 to 32015, got 32016"},
      {{{"eos_token_id", {2, 40000}}},
       "'eos_token_id': expected ids of the vocabulary, from 0 to 32015, got [2,40000]"},
      {{{"bos_token_id", -1}}, "'bos_token_id': expected ids of the vocabulary, from 0 to 32015, got -1"},
      {{{"bos_token_id", "<s>"}}, "'bos_token_id': expected ids of the vocabulary, from 0 to 32015, got \"<s>\""},
      {{{"rms_norm_eps", 0}}, "'rms_norm_eps': expected a number from 1e-30 to 1, got 0"},
      {{{"rms_norm_eps", "small"}}, "'rms_norm_eps': expected a number, got \"small\""},
      {{{"rope_theta", -1.0}}, "'rope_theta': expected a number from 1 to 1000000000000000, got -1"},
      {{{"tie_word_embeddings", 1}}, "'tie_word_embeddings': expected true or false, got 1"},
      {{{"rope_scaling", {{"type", "dynamic"}, {"factor", 2.0}}}},
       "'rope_scaling': 'type': expected default, linear or llama3, got \"dynamic\""},
      {{{"rope_scaling", {{"rope_type", "yarn"}, {"factor", 2.0}}}},
       "'rope_scaling': 'rope_type': expected default, linear or llama3, got \"yarn\""},
      {{{"rope_scaling", {{"rope_type", "linear"}, {"type", "yarn"}, {"factor", 2.0}}}},
       "'rope_scaling': 'type': expected 'linear', as rope_type, got \"yarn\""},
      {{{"rope_scaling", {{"factor", 2.0}}}}, "'rope_scaling': 'type' is missing"},
      {{{"rope_scaling", {{"type", "linear"}}}}, "'rope_scaling': 'factor' is missing"},
      {{{"rope_scaling", {{"type", "linear"}, {"factor", nullptr}}}},
       "'rope_scaling': 'factor': expected a number, got null"},
      {{{"rope_scaling", {{"type", "linear"}, {"factor", 0.5}}}},
       "'factor': expected a number from 1 to 1000000, got 0.5"},
      {{{"rope_scaling", "linear"}}, "'rope_scaling': expected an object, got \"linear\""},
      {{{"rope_scaling", changed(llama3, {{"low_freq_factor", 4.0}})}},
       "'low_freq_factor': expected less than high_freq_factor 4, got 4"},
      {{{"rope_scaling", changed(llama3, {{"original_max_position_embeddings", 200000000}})}},
       "'original_max_position_embeddings': expected a whole number from 1 to 100000000, got 200000000"},
      {{{"rope_scaling", llama3}, {"rope_parameters", llama3}},
       "'rope_scaling': expected none beside rope_parameters, got " + llama3.dump().substr(0, 80) + "..."},
      {{{"rope_parameters", {{"rope_type", "default"}, {"rope_theta", 5e5}}}},
       "'rope_theta': expected 500000, as rope_parameters has it, got 1000000"},
      {{{"rope_parameters", {{"rope_type", "default"}, {"partial_rotary_factor", 0.25}}}},
       "'rope_parameters': 'partial_rotary_factor': expected 1.0, the only value that is supported, got 0.25"}};
  for (auto const& [fields, expected] : cases) {
    CAPTURE(fields.dump());
    CHECK(refusal(with(fields)) == "'config.json': " + expected);
  }
  CHECK(refusal(with({{"eos_token_id", {2, 32015}}, {"bos_token_id", nullptr}})).empty());
  for (char const* const field : {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                                  "vocab_size", "max_position_embeddings", "model_type"})
    CHECK(refusal(without(field)) == "'config.json': '" + std::string(field) + "' is missing");
}

TEST_CASE("what is written is read again, every field", "[llama][config]") {
  LlamaConfig config{96, 172, 3, 12, 3, 10, 515, 77, 1e-6, 12345.0, {}, true};
  for (auto const& scaling : {transformer::RopeScaling{},
                              {.kind = Kind::linear, .factor = 2.5},
                              transformer::RopeScaling{Kind::llama3, 32.0, 1.5, 4.5, 4096}}) {
    config.rope_scaling = scaling;
    auto const text = llama::huggingface_config_text(config, 1, std::nullopt, "bfloat16");
    CHECK(llama::parse_huggingface_config(text, "what is written") == config);
    auto const json = Json::parse(text);
    CHECK(json["bos_token_id"] == 1);
    CHECK(json["eos_token_id"].is_null());
    CHECK(json["torch_dtype"] == "bfloat16");
  }
  config.sliding_window = 50;
  CHECK(llama::parse_huggingface_config(llama::huggingface_config_text(config, 1, 2, "float32"), "it") == config);
}

TEST_CASE("impossible shapes are errors that name the field", "[llama][config]") {
  LlamaConfig config;
  CHECK_NOTHROW(config.validate());
  config.num_key_value_heads = 0;
  CHECK_THROWS_WITH(config.validate(), "model: 'num_key_value_heads': expected a whole number from 1 to 10000, got 0");
}
