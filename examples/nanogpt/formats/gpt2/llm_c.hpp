// SPDX-License-Identifier: Apache-2.0
// llm.c's checkpoints of weights (train_gpt2.py: write_model; train_gpt2.cu: gpt2_write_to_checkpoint).
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>

#include "fsdp/files.hpp"
#include "nanogpt/gpt_config.hpp"
#include "transformer/weights/weights_source.hpp"

namespace nanogpt {

/// [Note: llm.c's checkpoint]
/// 256 int32: magic 20240326, version (3: fp32, 5: bf16), positions, vocabulary, layers, heads, width, padded
/// vocabulary; the rest is 0. Then wte (with the padding's rows), wpe, and 12 tensors of a layer, each for all layers
/// one after the other; the last norm. Linear weights are (out, in), as ours. All have biases; GELU is by tanh.
class LlmcFile final : public WeightsSource {
 public:
  /// Reads the header and compares it with the file's length.
  /// @throws fsdp::ConfigError saying what is wrong
  explicit LlmcFile(std::filesystem::path const& path);

  GptConfig const& config() const { return config_; }
  void read(std::string_view name, std::int64_t first, std::span<float> out) const override;

 private:
  struct Header {
    GptConfig config;
    std::int64_t padded_vocab = 0;
    std::int64_t element_bytes = 4;
  };
  struct Place {
    std::int64_t first = 0, count = 0;  ///< elements behind the header
  };
  static Header read_header(std::filesystem::path const& path);
  LlmcFile(std::filesystem::path const& path, Header const& header);

  GptConfig config_;
  fsdp::checkpoint::InputFile file_;
  std::int64_t element_bytes_;
  std::map<std::string, Place, std::less<>> places_;  ///< by our name
};

/// Whether the file begins with the magic number. @return false too if it cannot be read
bool is_llm_c(std::filesystem::path const& path);

/// Gives the file whole or not at all; one tensor is in memory at a time. Missing biases are zeros.
/// @param bf16         version 5, rounded to nearest even; else version 3
/// @param before_name  called when all is written, before the file has its name
/// @throws fsdp::ConfigError if it cannot be written
void write_llm_c(
    std::filesystem::path const& path, GptConfig const& config, WeightsSource const& weights, bool bf16,
    std::function<void()> const& before_name = [] {});

}  // namespace nanogpt
