// SPDX-License-Identifier: Apache-2.0
// The interface of weights: tensors by name, from any kind of file.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "transformer/weights/tensor_list.hpp"

namespace transformer {

/// A whole model's weights, of which each rank reads its part. Whoever makes one has checked that every tensor is there
/// with its shape, so that reading fails only if a file changes or a disk does.
class WeightsSource {
 public:
  WeightsSource(WeightsSource const&) = delete;
  WeightsSource& operator=(WeightsSource const&) = delete;
  virtual ~WeightsSource() = default;

  /// The file or folder.
  std::filesystem::path const& path() const { return path_; }

  /// Reads elements of a tensor as fp32, in the orientation that the model has it in: a linear layer's weight is
  /// (out, in).
  /// @param name   the model's
  /// @param first  element to begin with
  /// @pre the elements lie inside the tensor
  /// @throws fsdp::ConfigError if the file cannot be read
  virtual void read(std::string_view name, std::int64_t first, std::span<float> out) const = 0;

 protected:
  explicit WeightsSource(std::filesystem::path path) : path_(std::move(path)) {}

 private:
  std::filesystem::path path_;
};

/// Equal for equal weights, and most likely for no others: a checksum of the model's shape, and of some values in the
/// middle of each tensor. Ranks compare it, for each reads the files of its own machine.
/// @param shape  a text that models of the same shape have in common
std::string fingerprint(std::string shape, std::vector<WeightTensor> const& tensors, WeightsSource const& weights);

}  // namespace transformer
