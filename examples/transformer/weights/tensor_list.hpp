// SPDX-License-Identifier: Apache-2.0
// The tensors of a model, with their names and layouts in files.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace transformer {

/// A tensor as the model has it.
struct WeightTensor {
  std::string name;
  std::vector<std::int64_t> shape;  ///< ours: of a linear layer (out, in)
  bool transposed = false;          ///< files have it as (in, out)

  std::int64_t numel() const {
    std::int64_t product = 1;
    for (auto const extent : shape) product *= extent;
    return product;
  }
  /// The extents in files.
  std::vector<std::int64_t> stored_shape() const {
    return transposed ? std::vector<std::int64_t>(shape.rbegin(), shape.rend()) : shape;
  }
  bool is_bias() const { return std::string_view(name).ends_with(".bias"); }
};

/// Two names of one tensor: files may have either, or both with equal values.
struct TiedName {
  std::string name;    ///< the other name, as our_name gives it
  std::string tensor;  ///< the name in TensorList::tensors
  std::string reason;  ///< the end of the message if their values differ
};

/// The tensors that a folder of weights must have.
struct TensorList {
  std::vector<WeightTensor> tensors;
  std::vector<TiedName> tied;
  /// Our name of a tensor in a file; "" if it is to be ignored. An unknown name is given back as it is, and refused.
  std::function<std::string(std::string_view theirs)> our_name;
};

}  // namespace transformer
