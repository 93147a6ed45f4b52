// SPDX-License-Identifier: Apache-2.0
// The tensors of a Llama, and folders of HuggingFace's with them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/tensor.hpp"
#include "llama/llama_config.hpp"
#include "transformer/weights/tensor_list.hpp"
#include "transformer/weights/weights_folder.hpp"
#include "transformer/weights/weights_source.hpp"

namespace llama {

inline constexpr std::string_view token_table = "model.embed_tokens.weight";  // (V, C)
inline constexpr std::string_view head_matrix = "lm_head.weight";             // (V, C); not if it is tied

/// Every tensor of such a model by the names of LlamaForCausalLM, which are ours too: the table, layer by layer, the
/// last norm, and the head's matrix unless it is the table.
std::vector<WeightTensor> llama_tensors(LlamaConfig const& config);

/// What a folder with such a model has. A tied head's matrix may be there too, or in place of the table. Frequencies of
/// rotary embeddings, which old files have, are ignored.
TensorList llama_tensor_list(LlamaConfig const& config);

/// A Llama's weights, and the model that they are of.
class LlamaWeights : public WeightsSource {
 public:
  LlamaConfig const& config() const { return config_; }

 protected:
  LlamaWeights(std::filesystem::path path, LlamaConfig const& config)
      : WeightsSource(std::move(path)), config_(config) {}

 private:
  LlamaConfig config_;
};

/// A folder with the tensors of llama_tensor_list.
class LlamaFolder final : public LlamaWeights {
 public:
  /// @throws fsdp::ConfigError as WeightsFolder
  LlamaFolder(std::filesystem::path const& folder, LlamaConfig const& config)
      : LlamaWeights(folder, config), files_(folder, llama_tensor_list(config)) {}

  void read(std::string_view name, std::int64_t first, std::span<float> out) const override {
    files_.read(name, first, out);
  }
  /// Type of the elements in the file: f32, bf16 or f16.
  fsdp::DType dtype(std::string_view name) const { return files_.dtype(name); }

 private:
  WeightsFolder files_;
};

/// The model in a folder with config.json and safetensors files: found and checked, but not read.
/// @throws fsdp::ConfigError saying what is missing, wrong, or not supported
std::shared_ptr<LlamaFolder const> open_folder(std::filesystem::path const& folder);

}  // namespace llama
