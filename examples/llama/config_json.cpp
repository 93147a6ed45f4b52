// SPDX-License-Identifier: Apache-2.0
#include "llama/config_json.hpp"

#include <cmath>
#include <string>

#include "fsdp/checkpoint/files.hpp"
#include "fsdp/checkpoint/json.hpp"
#include "fsdp/error.hpp"
#include "transformer/tokenizer/special_ids.hpp"

namespace llama {
namespace {

using fsdp::checkpoint::Fields;
using fsdp::checkpoint::Json;
using Kind = RopeScaling::Kind;

constexpr std::int64_t longest_config = 1 << 20;  // bytes
constexpr std::int64_t largest = 1'000'000'000;   // LlamaConfig::validate has narrower limits

/// Fields of an object. Null is as good as missing: transformers then takes a value of its own.
struct Choices {
  Json const& json;
  Fields fields;
  std::string_view what;

  Choices(Json const& object, std::string_view text) : json(object), fields(object, text), what(text) {}

  bool has(char const* name) const { return json.contains(name) && !json[name].is_null(); }
  std::int64_t count(char const* name) const { return fields.whole(name, 1, largest); }
  std::int64_t count(char const* name, std::int64_t otherwise) const { return has(name) ? count(name) : otherwise; }
  double number(char const* name) const {
    if (!fields.at(name).is_number()) fields.wrong(name, "a number");
    return fields.number(name);
  }
  double number(char const* name, double otherwise) const { return has(name) ? number(name) : otherwise; }
  /// @throws fsdp::ConfigError unless the field is missing or null, or has the one value that is computed with
  void expect(char const* name, Json const& only) const {
    if (has(name) && json[name] != only) fields.wrong(name, only.dump() + ", the only value that is supported");
  }
  void expect_none(char const* name) const {
    if (has(name) && !(json[name].is_structured() && json[name].empty())) fields.wrong(name, "none");
  }
};

/// The scaling that an object of rope_scaling or rope_parameters describes.
RopeScaling scaling_from(Choices const& rope) {
  char const* const name = rope.has("rope_type") ? "rope_type" : "type";
  auto const kind = rope.fields.text(name);
  if (rope.has("type") && rope.fields.text("type") != kind)
    rope.fields.wrong("type", fsdp::formatted("'{}', as rope_type", kind));
  rope.expect("partial_rotary_factor", 1.0);
  RopeScaling scaling;
  if (kind == "default") return scaling;
  if (kind != "linear" && kind != "llama3") rope.fields.wrong(name, "default, linear or llama3");
  scaling.kind = kind == "linear" ? Kind::linear : Kind::llama3;
  scaling.factor = rope.number("factor");
  if (scaling.kind == Kind::linear) return scaling;
  scaling.low_freq_factor = rope.number("low_freq_factor");
  scaling.high_freq_factor = rope.number("high_freq_factor");
  scaling.original_max_position_embeddings = rope.count("original_max_position_embeddings");
  return scaling;
}

void read_rope(Choices const& choices, LlamaConfig& config) {
  choices.expect("partial_rotary_factor", 1.0);
  config.rope_theta = choices.number("rope_theta", 10000.0);
  config.rope_scaling = {};
  bool const is_new = choices.has("rope_parameters");
  char const* const name = is_new ? "rope_parameters" : "rope_scaling";
  if (!choices.has(name)) return;
  if (is_new && choices.has("rope_scaling")) choices.fields.wrong("rope_scaling", "none beside rope_parameters");
  auto const what = fsdp::formatted("{}: '{}'", choices.what, name);
  Choices const rope(choices.fields.object(name), what);
  config.rope_scaling = scaling_from(rope);
  if (!rope.has("rope_theta")) return;
  config.rope_theta = rope.number("rope_theta");
  if (choices.has("rope_theta") && choices.number("rope_theta") != config.rope_theta)
    choices.fields.wrong("rope_theta", fsdp::formatted("{}, as {} has it", config.rope_theta, name));
}

/// Every token sees all before it.
void expect_full_attention(Choices const& choices, bool is_mistral) {
  if (is_mistral) static_cast<void>(choices.fields.at("sliding_window"));  // transformers would take 4096
  if (choices.has("sliding_window")) choices.fields.wrong("sliding_window", "null: sliding windows are not supported");
  if (!choices.has("layer_types")) return;
  for (auto const& type : choices.fields.array("layer_types"))
    if (type != "full_attention") choices.fields.wrong("layer_types", "full_attention alone");
}

}  // namespace

LlamaConfig parse_huggingface_config(std::string_view text, std::string_view what) {
  auto const json = fsdp::checkpoint::parse_object(text, what);
  Choices const choices(json, what);
  auto const& fields = choices.fields;
  auto const type = fields.text("model_type");
  bool const is_mistral = type == "mistral";
  if (type != "llama" && !is_mistral) fields.wrong("model_type", "\"llama\", or \"mistral\" without a sliding window");
  choices.expect_none("quantization_config");
  choices.expect("attention_bias", false);
  choices.expect("mlp_bias", false);
  choices.expect("hidden_act", "silu");
  choices.expect("attention_dropout", 0.0);
  expect_full_attention(choices, is_mistral);

  LlamaConfig config;
  config.hidden_size = choices.count("hidden_size");
  config.intermediate_size = choices.count("intermediate_size");
  config.num_hidden_layers = choices.count("num_hidden_layers");
  config.num_attention_heads = choices.count("num_attention_heads");
  if (is_mistral) static_cast<void>(fields.at("num_key_value_heads"));  // transformers would take 8
  config.num_key_value_heads = choices.count("num_key_value_heads", config.num_attention_heads);
  if (!choices.has("head_dim") && config.hidden_size % config.num_attention_heads != 0)
    fields.wrong("num_attention_heads", fsdp::formatted("a divisor of hidden_size {}", config.hidden_size));
  config.head_dim = choices.count("head_dim", config.hidden_size / config.num_attention_heads);
  config.vocab_size = choices.count("vocab_size");
  transformer::expect_special_ids(json, config.vocab_size, what);
  config.max_position_embeddings = choices.count("max_position_embeddings");
  config.rms_norm_eps = choices.number("rms_norm_eps", 1e-6);
  config.tie_word_embeddings = choices.has("tie_word_embeddings") && fields.flag("tie_word_embeddings");
  read_rope(choices, config);
  config.validate(what);
  return config;
}

LlamaConfig read_huggingface_config(std::filesystem::path const& path) {
  return parse_huggingface_config(fsdp::checkpoint::read_text_file(path, longest_config),
                                  fsdp::formatted("'{}'", path.string()));
}

std::string huggingface_config_text(LlamaConfig const& config, std::optional<std::int64_t> begin_of_text,
                                    std::optional<std::int64_t> end_of_text, std::string_view dtype) {
  auto const token = [](std::optional<std::int64_t> id) { return id ? Json(*id) : Json(nullptr); };
  auto const& scaling = config.rope_scaling;
  Json rope = nullptr;
  if (scaling.kind == Kind::linear) rope = {{"rope_type", "linear"}, {"factor", scaling.factor}};
  if (scaling.kind == Kind::llama3)
    rope = {{"rope_type", "llama3"},
            {"factor", scaling.factor},
            {"low_freq_factor", scaling.low_freq_factor},
            {"high_freq_factor", scaling.high_freq_factor},
            {"original_max_position_embeddings", scaling.original_max_position_embeddings}};
  Json const json{{"architectures", {"LlamaForCausalLM"}},
                  {"model_type", "llama"},
                  {"hidden_size", config.hidden_size},
                  {"intermediate_size", config.intermediate_size},
                  {"num_hidden_layers", config.num_hidden_layers},
                  {"num_attention_heads", config.num_attention_heads},
                  {"num_key_value_heads", config.num_key_value_heads},
                  {"head_dim", config.head_dim},
                  {"vocab_size", config.vocab_size},
                  {"max_position_embeddings", config.max_position_embeddings},
                  {"rms_norm_eps", config.rms_norm_eps},
                  {"rope_theta", config.rope_theta},
                  {"rope_scaling", rope},
                  {"hidden_act", "silu"},
                  {"attention_bias", false},
                  {"mlp_bias", false},
                  {"attention_dropout", 0.0},
                  {"initializer_range", 0.02},
                  {"tie_word_embeddings", config.tie_word_embeddings},
                  // transformers would take 1 and 2, which other vocabularies do not have.
                  {"bos_token_id", token(begin_of_text)},
                  {"eos_token_id", token(end_of_text)},
                  {"torch_dtype", dtype}};
  return json.dump(2) + "\n";
}

}  // namespace llama
