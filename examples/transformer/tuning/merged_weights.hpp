// SPDX-License-Identifier: Apache-2.0
// Weights with adapters merged into them: W + scale * B A.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/layout.hpp"
#include "transformer/tuning/tuning.hpp"

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
  void add_to(std::span<float> weights, std::int64_t first, float scale) const {
    for (std::int64_t done = 0, size = static_cast<std::int64_t>(weights.size()); done < size;) {
      auto const row = (first + done) / in, begin = (first + done) % in;
      auto const count = std::min(in - begin, size - done);
      for (std::int64_t k = 0; k < rank; ++k) {
        float const factor = scale * b[static_cast<std::size_t>(row * rank + k)];
        auto const* const from = a.data() + k * in + begin;
        auto* const to = weights.data() + done;
        for (std::int64_t i = 0; i < count; ++i) to[i] += factor * from[i];
      }
      done += count;
    }
  }
};

/// Takes the tensors of a model one by one; those of an adapter come before their matrix.
class MergedWeights {
 public:
  /// @param scale  Tuning::lora_scale
  explicit MergedWeights(float scale) : scale_(scale) {}

  /// @pre is_adapter(tensor.name)
  void keep(fsdp::TensorInfo const& tensor, std::span<float const> values) {
    adapters_[adapted_weight(tensor.name)].values_of(tensor).assign(values.begin(), values.end());
  }
  /// @return the values with the tensor's adapter added, if it has one; valid until the next call
  std::span<float const> merge(std::string const& tensor, std::span<float const> values) {
    auto const found = adapters_.find(tensor);
    if (found == adapters_.end()) return values;
    merged_.assign(values.begin(), values.end());
    found->second.add_to(merged_, 0, scale_);
    adapters_.erase(found);
    return merged_;
  }

 private:
  float scale_;
  std::map<std::string, HostAdapter> adapters_;  ///< by name of the matrix
  std::vector<float> merged_;
};

}  // namespace transformer
