// SPDX-License-Identifier: Apache-2.0
// Weights with adapters merged into them: W + scale * B A.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/layout.hpp"
#include "transformer/tuning/tuning.hpp"
#include "transformer/weights/weights_source.hpp"

namespace transformer {

/// The adapter of a matrix, in host memory.
struct HostAdapter {
  std::int64_t rank = 0, in = 0;
  std::vector<float> a, b;  ///< (rank, in), (out, rank)

  bool is_whole() const { return !a.empty() && !b.empty(); }
  /// Where the values of one of its tensors belong. @pre is_adapter(tensor.name)
  std::vector<float>& values_of(fsdp::TensorInfo const& tensor) {
    if (!tensor.name.ends_with(lora_a)) return b;
    rank = tensor.shape[0], in = tensor.shape[1];
    return a;
  }
  /// Adds elements [first, first + weights.size()) of scale * B A.
  void add_to(std::span<float> weights, std::int64_t first, float scale) const;
};

/// The adapters of a model, in host memory.
struct HostAdapters {
  std::map<std::string, HostAdapter, std::less<>> of{};  ///< by name of the matrix
  float scale = 1.0f;                                    ///< Tuning::lora_scale

  /// Adds a tensor's adapter, if it has one, to elements [first, first + values.size()) of the tensor.
  void add_to(std::string_view tensor, std::int64_t first, std::span<float> values) const;
};

/// The weights of a model with adapters merged into them.
class AdaptedWeights final : public WeightsSource {
 public:
  AdaptedWeights(std::filesystem::path path, std::shared_ptr<WeightsSource const> base, HostAdapters adapters)
      : WeightsSource(std::move(path)), base_(std::move(base)), adapters_(std::move(adapters)) {}

  void read(std::string_view name, std::int64_t first, std::span<float> out) const override;

 private:
  std::shared_ptr<WeightsSource const> base_;
  HostAdapters adapters_;
};

/// Takes the tensors of a model one by one; those of an adapter come before their matrix.
class MergedWeights {
 public:
  /// @param scale  Tuning::lora_scale
  explicit MergedWeights(float scale) : adapters_{{}, scale} {}

  /// @pre is_adapter(tensor.name)
  void keep(fsdp::TensorInfo const& tensor, std::span<float const> values) {
    adapters_.of[adapted_weight(tensor.name)].values_of(tensor).assign(values.begin(), values.end());
  }
  /// @return the values with the tensor's adapter added, if it has one; valid until the next call
  std::span<float const> merge(std::string const& tensor, std::span<float const> values) {
    if (!adapters_.of.contains(tensor)) return values;
    merged_.assign(values.begin(), values.end());
    adapters_.add_to(tensor, 0, merged_);
    adapters_.of.erase(tensor);
    return merged_;
  }

 private:
  HostAdapters adapters_;  ///< of matrices that are still to come
  std::vector<float> merged_;
};

}  // namespace transformer
