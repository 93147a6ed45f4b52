// SPDX-License-Identifier: Apache-2.0
// Where a model's weights come from, whatever file they lie in.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string_view>
#include <utility>

#include "gpt_config.hpp"

namespace nanogpt {

/// A whole model's weights, of which each rank reads its part. Whoever makes one has checked that every tensor is there
/// with its shape, so that reading fails only if a file changes or a disk does.
class WeightsSource {
 public:
  WeightsSource(WeightsSource const&) = delete;
  WeightsSource& operator=(WeightsSource const&) = delete;
  virtual ~WeightsSource() = default;

  /// The model as it is stored; its dropout is 0.
  GptConfig const& config() const { return config_; }
  /// The file or folder.
  std::filesystem::path const& path() const { return path_; }

  /// Reads elements of a tensor as fp32, in the orientation that the model has it in: a linear layer's weight is
  /// (out, in). A model with a shorter block reads the first rows of wpe.
  /// @param name   the model's, "transformer.h.0.attn.c_attn.weight"
  /// @param first  element to begin with
  /// @pre the elements lie inside the tensor
  /// @throws fsdp::ConfigError if the file cannot be read
  virtual void read(std::string_view name, std::int64_t first, std::span<float> out) const = 0;

 protected:
  WeightsSource(std::filesystem::path path, GptConfig const& config) : path_(std::move(path)), config_(config) {}

 private:
  std::filesystem::path path_;
  GptConfig config_;
};

}  // namespace nanogpt
