// SPDX-License-Identifier: Apache-2.0
#include "nanogpt/formats/gpt2/config_json.hpp"

#include <array>
#include <string>
#include <utility>

#include "fsdp/error.hpp"
#include "fsdp/files.hpp"
#include "fsdp/json.hpp"
#include "nanogpt/formats/gpt2/tensor_names.hpp"
#include "nanogpt/formats/model_json.hpp"
#include "transformer/data/dataset.hpp"
#include "transformer/tokenizer/special_ids.hpp"
#include "transformer/weights/config_fields.hpp"

namespace nanogpt {
namespace {

using fsdp::checkpoint::Json;

constexpr std::int64_t longest_config = 1 << 20;  // bytes

// Keys of config.json that are read.
constexpr std::array keys_of_gpt2 =
    std::to_array<std::string_view>({"model_type", "n_layer", "n_head", "n_embd", "n_positions", "n_ctx", "n_inner",
                                     "vocab_size", "activation_function", "layer_norm_epsilon", "scale_attn_weights",
                                     "scale_attn_by_inverse_layer_idx", "tie_word_embeddings"});
// Keys without effect that are found in GPT-2s only: the rates of dropout, which are those of the settings; how exact
// the scores of attention are computed; and the head for classification.
constexpr std::array other_keys_of_gpt2 = std::to_array<std::string_view>(
    {"attn_pdrop", "embd_pdrop", "resid_pdrop", "reorder_and_upcast_attn", "gradient_checkpointing",
     "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj"});

Activation activation_of(ConfigFields const& json) {
  if (!json.has("activation_function")) return Activation::gelu_new;
  auto const name = json.fields().text("activation_function");
  if (name == "gelu") return Activation::gelu;
  if (name == "gelu_new" || name == "gelu_pytorch_tanh") return Activation::gelu_new;
  json.wrong("activation_function", "gelu, gelu_new or gelu_pytorch_tanh");
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
  auto const object = fsdp::checkpoint::parse_object(text, what);
  ConfigFields const json(object, what);
  auto const& fields = json.fields();
  if (fields.text("model_type") != "gpt2") json.wrong("model_type", "\"gpt2\"");

  GptConfig config = shape_from(fields, "n_positions");
  config.bias = true;
  config.activation = activation_of(json);
  expect_possible(config, what);
  // transformers writes GPT-2's 50256 for every vocabulary, unless it is told another id.
  transformer::expect_special_ids(object, config.vocab_size, what, transformer::gpt2_tokens - 1);

  if (json.has("n_ctx")) fields.whole("n_ctx", config.block_size, config.block_size);
  if (json.has("n_inner")) fields.whole("n_inner", 4 * config.n_embd, 4 * config.n_embd);
  if (json.number("layer_norm_epsilon", 1e-5) != 1e-5) json.wrong("layer_norm_epsilon", "1e-05");
  json.expect("scale_attn_weights", true);
  json.expect("scale_attn_by_inverse_layer_idx", false);
  json.expect("tie_word_embeddings", true);
  expect_plain_model(json);
  json.expect_known({keys_of_gpt2, other_keys_of_gpt2, keys_of_plain_models, keys_without_effect});
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
