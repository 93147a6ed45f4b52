// SPDX-License-Identifier: Apache-2.0
// Adapters in files, as peft has them: adapter_config.json and adapter_model.safetensors.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "llama/formats/weights.hpp"
#include "transformer/run/settings.hpp"
#include "transformer/tuning/merged_weights.hpp"

namespace llama {

inline constexpr std::string_view adapter_config_name = "adapter_config.json";
inline constexpr std::string_view adapter_weights_name = "adapter_model.safetensors";

/// The name that peft has for a tensor of an adapter: "base_model.model." before ours.
std::string peft_name(std::string_view tensor);

/// adapter_config.json of adapters for the model in `base`.
std::string adapter_config_text(Settings const& settings, std::filesystem::path const& base);

/// A folder with adapters, as adapter_config.json describes them.
struct AdapterFolder {
  std::filesystem::path base;  ///< the folder of their model, or its name on a hub; may be empty
  std::int64_t rank = 0;
  double alpha = 0;
  std::vector<std::string> targets{};  ///< names of layers, or their ends: "q_proj"
  bool all_linear_layers = false;      ///< all linear layers of the blocks are targets
  std::vector<std::int64_t> layers{};  ///< numbers of the blocks whose targets have adapters; empty: all

  /// Whether a matrix has an adapter. @param matrix  "model.layers.0.self_attn.q_proj.weight"
  bool adapts(std::string_view matrix) const;
};

bool is_adapter_folder(std::filesystem::path const& folder);
/// @throws ConfigError naming the first key that is missing, with which peft computes what we do not, or whose effect
/// is not known
AdapterFolder read_adapter_config(std::filesystem::path const& folder);
/// Reads the adapters. @throws ConfigError if one does not fit a matrix of the model, is missing, or is no target
HostAdapters read_adapters(std::filesystem::path const& folder, LlamaConfig const& config);

}  // namespace llama
