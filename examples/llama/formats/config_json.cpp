// SPDX-License-Identifier: Apache-2.0
#include "llama/formats/config_json.hpp"

#include <array>
#include <string>
#include <system_error>

#include "fsdp/error.hpp"
#include "fsdp/files.hpp"
#include "fsdp/json.hpp"
#include "transformer/tokenizer/special_ids.hpp"
#include "transformer/weights/config_fields.hpp"

namespace llama {
namespace {

using fsdp::checkpoint::Json;
using Kind = RopeScaling::Kind;

constexpr std::int64_t longest_config = 1 << 20;  // bytes

// Keys of config.json that are read.
constexpr std::array keys_of_llama =
    std::to_array<std::string_view>({"model_type",        "attention_bias",      "mlp_bias",
                                     "hidden_act",        "attention_dropout",   "sliding_window",
                                     "layer_types",       "hidden_size",         "intermediate_size",
                                     "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                                     "head_dim",          "vocab_size",          "max_position_embeddings",
                                     "rms_norm_eps",      "tie_word_embeddings", "partial_rotary_factor",
                                     "rope_theta",        "rope_scaling",        "rope_parameters",
                                     "rope_interleaved"});
// Keys without effect that are found in Llamas only.
constexpr std::array other_keys_of_llama =
    std::to_array<std::string_view>({"is_llama_config", "max_sequence_length", "pretraining_tp"});
constexpr std::array keys_of_rope =
    std::to_array<std::string_view>({"rope_type", "type", "factor", "low_freq_factor", "high_freq_factor",
                                     "original_max_position_embeddings", "rope_theta", "partial_rotary_factor"});

/// The scaling that an object of rope_scaling or rope_parameters describes.
RopeScaling scaling_from(ConfigFields const& rope) {
  rope.expect_known({keys_of_rope});
  rope.expect("partial_rotary_factor", 1.0);
  RopeScaling scaling;
  char const* const name = rope.has("rope_type") ? "rope_type" : "type";
  if (!rope.has(name) && !rope.has("factor")) return scaling;  // as transformers 5: the default type
  auto const kind = rope.fields().text(name);
  if (rope.has("type") && rope.fields().text("type") != kind)
    rope.wrong("type", fsdp::formatted("'{}', as rope_type", kind));
  if (kind == "default") return scaling;
  if (kind != "linear" && kind != "llama3") rope.wrong(name, "default, linear or llama3");
  scaling.kind = kind == "linear" ? Kind::linear : Kind::llama3;
  scaling.factor = rope.number("factor");
  if (scaling.kind == Kind::linear) return scaling;
  scaling.low_freq_factor = rope.number("low_freq_factor");
  scaling.high_freq_factor = rope.number("high_freq_factor");
  scaling.original_max_position_embeddings = rope.count("original_max_position_embeddings");
  return scaling;
}

void read_rope(ConfigFields const& json, LlamaConfig& config) {
  json.expect("partial_rotary_factor", 1.0);
  json.expect("rope_interleaved", false);
  config.rope_theta = json.number("rope_theta", 10000.0);
  config.rope_scaling = {};
  bool const is_new = json.has("rope_parameters");
  char const* const name = is_new ? "rope_parameters" : "rope_scaling";
  if (!json.has(name)) return;
  if (is_new && json.has("rope_scaling")) json.wrong("rope_scaling", "none beside rope_parameters");
  auto const what = fsdp::formatted("{}: '{}'", json.what(), name);
  ConfigFields const rope(json.fields().object(name), what);
  config.rope_scaling = scaling_from(rope);
  if (!rope.has("rope_theta")) return;
  config.rope_theta = rope.number("rope_theta");
  if (json.has("rope_theta") && json.number("rope_theta") != config.rope_theta)
    json.wrong("rope_theta", fsdp::formatted("{}, as {} has it", config.rope_theta, name));
}

/// Every token sees all before it, in sequences that are no longer than the window.
void read_attention(ConfigFields const& json, LlamaConfig& config, bool is_mistral) {
  auto const of_mistral = is_mistral && !json.json().contains("sliding_window") ? 4096 : 0;  // transformers' default
  config.sliding_window = json.count("sliding_window", of_mistral);
  if (!json.has("layer_types")) return;
  for (auto const& type : json.fields().array("layer_types"))
    if (type != "full_attention" && (type != "sliding_attention" || config.sliding_window == 0))
      json.wrong("layer_types", "full_attention alone, or sliding_attention with a sliding_window");
}

}  // namespace

LlamaConfig parse_huggingface_config(std::string_view text, std::string_view what) {
  auto const object = fsdp::checkpoint::parse_object(text, what);
  ConfigFields const json(object, what);
  auto const& fields = json.fields();
  auto const type = fields.text("model_type");
  bool const is_mistral = type == "mistral";
  if (type != "llama" && !is_mistral) json.wrong("model_type", "\"llama\" or \"mistral\"");
  expect_plain_model(json);
  json.expect("attention_bias", false);
  json.expect("mlp_bias", false);
  json.expect("hidden_act", "silu");
  json.expect("attention_dropout", 0.0);

  LlamaConfig config;
  read_attention(json, config, is_mistral);
  config.hidden_size = json.count("hidden_size");
  config.intermediate_size = json.count("intermediate_size");
  config.num_hidden_layers = json.count("num_hidden_layers");
  config.num_attention_heads = json.count("num_attention_heads");
  if (is_mistral) static_cast<void>(fields.at("num_key_value_heads"));  // transformers would take 8
  config.num_key_value_heads = json.count("num_key_value_heads", config.num_attention_heads);
  if (!json.has("head_dim") && config.hidden_size % config.num_attention_heads != 0)
    json.wrong("num_attention_heads", fsdp::formatted("a divisor of hidden_size {}", config.hidden_size));
  config.head_dim = json.count("head_dim", config.hidden_size / config.num_attention_heads);
  config.vocab_size = json.count("vocab_size");
  transformer::expect_special_ids(object, config.vocab_size, what);
  config.max_position_embeddings = json.count("max_position_embeddings");
  config.rms_norm_eps = json.number("rms_norm_eps", 1e-6);
  config.tie_word_embeddings = json.flag("tie_word_embeddings", false);
  read_rope(json, config);
  json.expect_known({keys_of_llama, other_keys_of_llama, keys_of_plain_models, keys_without_effect});
  config.validate(what);
  return config;
}

LlamaConfig read_huggingface_config(std::filesystem::path const& path) {
  return parse_huggingface_config(fsdp::checkpoint::read_text_file(path, longest_config),
                                  fsdp::formatted("'{}'", path.string()));
}

std::string changed_config_text(std::initializer_list<std::filesystem::path> folders, LlamaConfig const& config,
                                std::string_view dtype) {
  std::error_code error;
  for (auto const& folder : folders) {
    auto const path = folder / "config.json";
    if (folder.empty() || !std::filesystem::is_regular_file(path, error)) continue;
    auto const text = fsdp::checkpoint::read_text_file(path, longest_config);
    auto const what = fsdp::formatted("'{}'", path.string());
    if (parse_huggingface_config(text, what) != config) continue;
    auto json = fsdp::checkpoint::parse_object(text, what);
    json["architectures"] = {json["model_type"] == "mistral" ? "MistralForCausalLM" : "LlamaForCausalLM"};
    if (json.contains("dtype")) json["dtype"] = dtype;
    if (json.contains("torch_dtype") || !json.contains("dtype")) json["torch_dtype"] = dtype;
    return json.dump(2) + "\n";
  }
  return {};
}

std::string huggingface_config_text(LlamaConfig const& config, std::optional<std::int64_t> begin_of_text,
                                    std::optional<std::int64_t> end_of_text, std::string_view dtype) {
  auto const token = [](std::optional<std::int64_t> id) { return id ? Json(*id) : Json(nullptr); };
  bool const windowed = config.sliding_window > 0;  // transformers' Llama has no windows
  auto const& scaling = config.rope_scaling;
  Json rope = nullptr;
  if (scaling.kind == Kind::linear) rope = {{"rope_type", "linear"}, {"factor", scaling.factor}};
  if (scaling.kind == Kind::llama3)
    rope = {{"rope_type", "llama3"},
            {"factor", scaling.factor},
            {"low_freq_factor", scaling.low_freq_factor},
            {"high_freq_factor", scaling.high_freq_factor},
            {"original_max_position_embeddings", scaling.original_max_position_embeddings}};
  Json json{{"architectures", {windowed ? "MistralForCausalLM" : "LlamaForCausalLM"}},
            {"model_type", windowed ? "mistral" : "llama"},
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
  if (windowed) json["sliding_window"] = config.sliding_window;
  return json.dump(2) + "\n";
}

}  // namespace llama
