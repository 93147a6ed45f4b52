// SPDX-License-Identifier: Apache-2.0
#include "transformer/weights/weights_source.hpp"

#include <algorithm>

#include "fsdp/checkpoint.hpp"

namespace transformer {

std::string fingerprint(std::string shape, std::vector<WeightTensor> const& tensors, WeightsSource const& weights) {
  std::vector<float> values;
  for (auto const& tensor : tensors) {
    values.resize(static_cast<std::size_t>(std::min<std::int64_t>(64, tensor.numel())));
    weights.read(tensor.name, tensor.numel() / 2 - static_cast<std::int64_t>(values.size() / 2), values);
    shape.append(reinterpret_cast<char const*>(values.data()), values.size() * sizeof(float));
  }
  return fsdp::checkpoint::checksum_text(fsdp::checkpoint::checksum_of(shape));
}

}  // namespace transformer
