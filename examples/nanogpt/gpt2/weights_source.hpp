// SPDX-License-Identifier: Apache-2.0
// A GPT's weights, and the model that they are of.
#pragma once

#include <filesystem>
#include <utility>

#include "gpt_config.hpp"
#include "transformer/weights/weights_source.hpp"

namespace nanogpt {

/// A model with a shorter block reads the first rows of wpe. Linear layers: "transformer.h.0.attn.c_attn.weight" is
/// (out, in).
class GptWeights : public WeightsSource {
 public:
  /// The model as it is stored; its dropout is 0.
  GptConfig const& config() const { return config_; }

 protected:
  GptWeights(std::filesystem::path path, GptConfig const& config) : WeightsSource(std::move(path)), config_(config) {}

 private:
  GptConfig config_;
};

}  // namespace nanogpt
