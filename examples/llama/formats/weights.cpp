// SPDX-License-Identifier: Apache-2.0
#include "llama/formats/weights.hpp"

#include <string>
#include <system_error>

#include "fsdp/error.hpp"
#include "llama/formats/config_json.hpp"
#include "transformer/weights/weights_folder.hpp"

namespace llama {
namespace {

/// LlamaModel saves its tensors without the "model." that they have in a LlamaForCausalLM.
std::string our_name(std::string_view theirs) {
  if (theirs.ends_with("rotary_emb.inv_freq")) return {};
  for (std::string_view const part : {"embed_tokens.", "layers.", "norm."})
    if (theirs.starts_with(part)) return "model." + std::string(theirs);
  return std::string(theirs);
}

}  // namespace

std::vector<WeightTensor> llama_tensors(LlamaConfig const& config) {
  auto const width = config.hidden_size, mlp = config.intermediate_size, queries = config.heads().width();
  auto const keys = config.num_key_value_heads * config.head_dim;
  std::vector<WeightTensor> list;
  list.push_back({std::string(token_table), {config.vocab_size, width}});
  for (std::int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    auto const tensor = [&](std::string_view name, std::vector<std::int64_t> shape) {
      list.push_back({fsdp::formatted("model.layers.{}.{}.weight", layer, name), std::move(shape)});
    };
    tensor("input_layernorm", {width});
    tensor("self_attn.q_proj", {queries, width});
    tensor("self_attn.k_proj", {keys, width});
    tensor("self_attn.v_proj", {keys, width});
    tensor("self_attn.o_proj", {width, queries});
    tensor("post_attention_layernorm", {width});
    tensor("mlp.gate_proj", {mlp, width});
    tensor("mlp.up_proj", {mlp, width});
    tensor("mlp.down_proj", {width, mlp});
  }
  list.push_back({"model.norm.weight", {width}});
  if (!config.tie_word_embeddings) list.push_back({std::string(head_matrix), {config.vocab_size, width}});
  return list;
}

TensorList llama_tensor_list(LlamaConfig const& config) {
  TensorList list{llama_tensors(config), {}, our_name};
  if (config.tie_word_embeddings)
    list.tied = {{std::string(head_matrix), std::string(token_table),
                  "expected equal values, for config.json says tie_word_embeddings"}};
  return list;
}

OpenedLlama open_folder(std::filesystem::path const& folder) {
  auto const path = folder / "config.json";
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error))
    fsdp::fail<fsdp::ConfigError>("'{}' has no config.json, which describes the model", folder.string());
  auto const config = read_huggingface_config(path);
  return {config, std::make_shared<WeightsFolder>(folder, llama_tensor_list(config)), folder, 0, folder};
}

}  // namespace llama
