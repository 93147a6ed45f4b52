// SPDX-License-Identifier: Apache-2.0
// Adapters in files, as peft has them: adapter_config.json and adapter_model.safetensors.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "llama/weights.hpp"
#include "transformer/run/settings.hpp"
#include "transformer/tuning/merged_weights.hpp"

namespace llama {

inline constexpr std::string_view adapter_config_name = "adapter_config.json";
inline constexpr std::string_view adapter_weights_name = "adapter_model.safetensors";

/// The name that peft has for a tensor of an adapter: "base_model.model." before ours.
std::string peft_name(std::string_view tensor);

/// adapter_config.json of adapters for the model in `base`.
std::string adapter_config_text(Settings const& settings, std::filesystem::path const& base);

/// A folder with adapters.
struct AdapterFolder {
  std::filesystem::path base;  ///< the folder of their model, as adapter_config.json names it
  std::int64_t rank = 0;
  double alpha = 0;
};

bool is_adapter_folder(std::filesystem::path const& folder);
/// @throws ConfigError naming the field that is missing, or for which we have nothing
AdapterFolder read_adapter_config(std::filesystem::path const& folder);
/// Reads the adapters. @throws ConfigError if one does not fit a matrix of the model
HostAdapters read_adapters(std::filesystem::path const& folder, LlamaConfig const& config);

}  // namespace llama
