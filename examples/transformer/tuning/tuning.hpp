// SPDX-License-Identifier: Apache-2.0
// Fine-tuning: which tensors of a model train.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace transformer {

/// By default, every tensor trains.
///
/// With adapters (Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022) everything else is frozen:
/// each matrix W (out, in) of the blocks acts as W + lora_scale * B A, with A (lora_rank, in) and B (out, lora_rank). B
/// starts at zero.
struct Tuning {
  std::int64_t lora_rank = 0;    ///< 0: no adapters
  float lora_scale = 1.0f;       ///< alpha / lora_rank
  std::int64_t last_layers = 0;  ///< above 0: the last so many blocks and the final norm train, and nothing else

  bool adapts() const { return lora_rank > 0; }
  /// The layer's own tensors train.
  bool trains(std::int64_t layer, std::int64_t layers) const {
    return !adapts() && (last_layers == 0 || layer >= layers - last_layers);
  }
  bool trains_embeddings() const { return !adapts() && last_layers == 0; }
};

/// Ends of the names of adapters: "transformer.h.0.attn.c_attn.lora_A.weight".
inline constexpr std::string_view lora_a = ".lora_A.weight", lora_b = ".lora_B.weight";
inline bool is_adapter(std::string_view tensor) { return tensor.ends_with(lora_a) || tensor.ends_with(lora_b); }
/// The matrix that an adapter's tensor belongs to. @pre is_adapter(tensor)
inline std::string adapted_weight(std::string_view tensor) {
  return std::string(tensor.substr(0, tensor.size() - lora_a.size())) + ".weight";
}

}  // namespace transformer
