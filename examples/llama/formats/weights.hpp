// SPDX-License-Identifier: Apache-2.0
// The tensors of a Llama, and folders of HuggingFace's with them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "llama/llama_config.hpp"
#include "transformer/weights/tensor_list.hpp"
#include "transformer/weights/weights_source.hpp"

namespace llama {

inline constexpr std::string_view token_table = "model.embed_tokens.weight";  // (V, C)
inline constexpr std::string_view head_matrix = "lm_head.weight";             // (V, C); not if it is tied

/// Every tensor of such a model by the names of LlamaForCausalLM, which are ours too: the table, layer by layer, the
/// last norm, and the head's matrix unless it is the table.
std::vector<WeightTensor> llama_tensors(LlamaConfig const& config);

/// The tensors that the files of such a model have. Names may lack the prefix "model.". A tied head's matrix may be
/// there too, or in place of the table. Frequencies of rotary embeddings, which old files have, are ignored.
TensorList llama_tensor_list(LlamaConfig const& config);

/// A model whose weights have been found and checked, but not read.
struct OpenedLlama {
  LlamaConfig config;
  std::shared_ptr<WeightsSource const> weights;
  std::filesystem::path tokenizer;   ///< the folder of its tokenizer
  std::int64_t iteration = 0;        ///< of a run of ours: steps that it was trained
  std::filesystem::path original{};  ///< the folder of the model that training began with; empty: it is not there

  std::filesystem::path const& path() const { return weights->path(); }
};

/// The model in a folder with config.json and safetensors files: found and checked, but not read.
/// @throws fsdp::ConfigError saying what is missing, wrong, or not supported
OpenedLlama open_folder(std::filesystem::path const& folder);

}  // namespace llama
