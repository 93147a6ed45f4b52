// SPDX-License-Identifier: Apache-2.0
// Fine-tuning: selects the tensors of a model that train.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/error.hpp"

namespace transformer {

/// By default, every tensor trains.
///
/// With adapters (Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022) everything else is frozen:
/// each matrix W (out, in) of a target acts as W + lora_scale * B A, with A (lora_rank, in) and B (out, lora_rank). B
/// starts at zero.
struct Tuning {
  std::int64_t lora_rank = 0;               ///< 0: no adapters
  float lora_scale = 1.0f;                  ///< alpha / lora_rank
  std::vector<std::string> lora_targets{};  ///< linear layers of the blocks, by the ends of their names; none: all
  std::int64_t last_layers = 0;    ///< above 0: the embeddings and all blocks but this many last ones are frozen
  std::int64_t frozen_layers = 0;  ///< above 0: the embeddings and this many lowest blocks are frozen

  bool adapts() const { return lora_rank > 0; }
  /// The linear layer has an adapter. @param layer  name in its block: "attn.c_attn" is the target "c_attn"
  bool adapts(std::string_view layer) const {
    return adapts() && (lora_targets.empty() || std::any_of(lora_targets.begin(), lora_targets.end(),
                                                            [&](auto const& target) { return names(target, layer); }));
  }
  /// The number of lowest blocks, of `layers`, that have no backward: nothing trains in them or below.
  std::int64_t layers_below(std::int64_t layers) const {
    if (adapts()) return 0;
    return std::max(frozen_layers, last_layers == 0 ? 0 : layers - last_layers);
  }
  /// The layer's own tensors train.
  bool trains(std::int64_t layer, std::int64_t layers) const { return !adapts() && layer >= layers_below(layers); }
  bool trains_embeddings() const { return !adapts() && last_layers == 0 && frozen_layers == 0; }
  /// @param tied  the head's matrix is that of the token embedding
  bool trains_head(bool tied) const { return tied ? trains_embeddings() : !adapts(); }

  static bool names(std::string_view target, std::string_view layer) {
    return layer.ends_with(target) && (layer.size() == target.size() || layer[layer.size() - target.size() - 1] == '.');
  }
};

/// @param layers  names of all linear layers of a block
/// @param what  begins the message
/// @throws fsdp::ConfigError if a target names none of them
inline void expect_targets(Tuning const& tuning, std::span<std::string_view const> layers,
                           std::string_view what = "adapters") {
  for (auto const& target : tuning.lora_targets) {
    bool const known =
        std::any_of(layers.begin(), layers.end(), [&](auto const& layer) { return Tuning::names(target, layer); });
    if (known && !target.empty()) continue;
    std::string all;
    for (auto const& layer : layers) all += (all.empty() ? "" : ", ") + std::string(layer);
    fsdp::fail<fsdp::ConfigError>("{}: expected names among {}, got '{}'", what, all, target);
  }
}

/// Ends of the names of adapters: "transformer.h.0.attn.c_attn.lora_A.weight".
inline constexpr std::string_view lora_a = ".lora_A.weight", lora_b = ".lora_B.weight";
inline bool is_adapter(std::string_view tensor) { return tensor.ends_with(lora_a) || tensor.ends_with(lora_b); }
/// The matrix that an adapter's tensor belongs to. @pre is_adapter(tensor)
inline std::string adapted_weight(std::string_view tensor) {
  return std::string(tensor.substr(0, tensor.size() - lora_a.size())) + ".weight";
}

}  // namespace transformer
