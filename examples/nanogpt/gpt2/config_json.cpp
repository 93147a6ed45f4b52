// SPDX-License-Identifier: Apache-2.0
#include "gpt2/config_json.hpp"

#include <string>
#include <utility>

#include "fsdp/checkpoint/files.hpp"
#include "fsdp/checkpoint/json.hpp"
#include "fsdp/error.hpp"
#include "gpt2/tensor_names.hpp"
#include "model_json.hpp"
#include "transformer/data/dataset.hpp"
#include "transformer/tokenizer/special_ids.hpp"

namespace nanogpt {
namespace {

using fsdp::checkpoint::Fields;
using fsdp::checkpoint::Json;

constexpr std::int64_t longest_config = 1 << 20;  // bytes

/// Fields of which transformers knows the value where the file has none.
struct Choices {
  Json const& json;
  Fields fields;

  bool has(char const* name) const { return json.contains(name) && !json[name].is_null(); }
  /// @throws fsdp::ConfigError unless the field is missing, or the one value that is computed with
  void expect(char const* name, bool value) const {
    if (!has(name)) return;
    if (!json[name].is_boolean() || json[name].get<bool>() != value)
      fields.wrong(
          name, value ? "true, the only value that nanogpt supports" : "false, the only value that nanogpt supports");
  }
  void expect_none(char const* name) const {
    if (has(name) && !(json[name].is_structured() && json[name].empty())) fields.wrong(name, "none");
  }
};

Activation activation_of(Choices const& choices) {
  if (!choices.has("activation_function")) return Activation::gelu_new;
  auto const name = choices.fields.text("activation_function");
  if (name == "gelu") return Activation::gelu;
  if (name == "gelu_new" || name == "gelu_pytorch_tanh") return Activation::gelu_new;
  choices.fields.wrong("activation_function", "gelu, gelu_new or gelu_pytorch_tanh");
}

}  // namespace

ConfigKind kind_of_config(std::filesystem::path const& path) {
  auto const what = fsdp::formatted("'{}'", path.string());
  auto const json = fsdp::checkpoint::parse_object(fsdp::checkpoint::read_text_file(path, longest_config), what);
  if (json.contains("model_args")) return ConfigKind::nanogpt;
  if (json.contains("model_type")) return ConfigKind::huggingface;
  fsdp::fail<fsdp::ConfigError>(
      "{}: expected a config.json of HuggingFace (with 'model_type') or of nanogpt (with 'model_args'), got neither",
      what);
}

GptConfig parse_huggingface_config(std::string_view text, std::string_view what) {
  auto const json = fsdp::checkpoint::parse_object(text, what);
  Choices const choices{json, Fields(json, what)};
  auto const& fields = choices.fields;
  if (fields.text("model_type") != "gpt2") fields.wrong("model_type", "\"gpt2\"");

  GptConfig config = shape_from(fields, "n_positions");
  config.bias = true;
  config.activation = activation_of(choices);
  expect_possible(config, what);
  // transformers writes GPT-2's 50256 for every vocabulary, unless it is told another id.
  transformer::expect_special_ids(json, config.vocab_size, what, transformer::gpt2_tokens - 1);

  if (choices.has("n_ctx")) fields.whole("n_ctx", config.block_size, config.block_size);
  if (choices.has("n_inner")) fields.whole("n_inner", 4 * config.n_embd, 4 * config.n_embd);
  if (choices.has("layer_norm_epsilon") &&
      !(json["layer_norm_epsilon"].is_number() && json["layer_norm_epsilon"].get<double>() == 1e-5))
    fields.wrong("layer_norm_epsilon", "1e-05");
  choices.expect("scale_attn_weights", true);
  choices.expect("scale_attn_by_inverse_layer_idx", false);
  choices.expect("add_cross_attention", false);
  choices.expect("tie_word_embeddings", true);
  choices.expect_none("pruned_heads");
  choices.expect_none("quantization_config");
  return config;
}

GptConfig read_huggingface_config(std::filesystem::path const& path) {
  return parse_huggingface_config(fsdp::checkpoint::read_text_file(path, longest_config),
                                  fsdp::formatted("'{}'", path.string()));
}

std::string huggingface_config_text(GptConfig const& config, std::optional<std::int64_t> end_of_text, double dropout,
                                    std::string_view dtype) {
  Json json{{"architectures", {"GPT2LMHeadModel"}},
            {"model_type", "gpt2"},
            {"activation_function", config.activation == Activation::gelu ? "gelu" : "gelu_new"},
            {"n_layer", config.n_layer},
            {"n_head", config.n_head},
            {"n_embd", config.n_embd},
            {"n_inner", nullptr},
            {"n_positions", config.block_size},
            {"n_ctx", config.block_size},
            {"vocab_size", config.vocab_size},
            {"layer_norm_epsilon", 1e-5},
            {"initializer_range", 0.02},
            {"attn_pdrop", dropout},
            {"embd_pdrop", dropout},
            {"resid_pdrop", dropout},
            {"scale_attn_weights", true},
            {"scale_attn_by_inverse_layer_idx", false},
            {"reorder_and_upcast_attn", false},
            {"tie_word_embeddings", true},
            {"torch_dtype", dtype}};
  // transformers would take GPT-2's 50256, which other vocabularies do not have.
  json["bos_token_id"] = end_of_text ? Json(*end_of_text) : Json(nullptr);
  json["eos_token_id"] = json["bos_token_id"];
  return json.dump(2) + "\n";
}

}  // namespace nanogpt
