// SPDX-License-Identifier: Apache-2.0
// A GPT's weights in safetensors files: HuggingFace's, in one file or several, and our own.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string_view>

#include "gpt2/tensor_names.hpp"
#include "gpt2/weights_source.hpp"
#include "transformer/weights/weights_folder.hpp"

namespace nanogpt {

/// A folder with the tensors of gpt_tensor_list.
class GptFolder final : public GptWeights {
 public:
  /// @param config  the folder's model
  /// @throws fsdp::ConfigError as WeightsFolder
  GptFolder(std::filesystem::path const& folder, GptConfig const& config, Orientation orientation)
      : GptWeights(folder, config), files_(folder, gpt_tensor_list(config, orientation)) {}

  void read(std::string_view name, std::int64_t first, std::span<float> out) const override {
    files_.read(name, first, out);
  }

 private:
  WeightsFolder files_;
};

}  // namespace nanogpt
