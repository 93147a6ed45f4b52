// SPDX-License-Identifier: Apache-2.0
#include "transformer/tuning/merged_weights.hpp"

#include <algorithm>
#include <cstddef>

namespace transformer {

void HostAdapter::add_to(std::span<float> weights, std::int64_t first, float scale) const {
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

void HostAdapters::add_to(std::string_view tensor, std::int64_t first, std::span<float> values) const {
  if (auto const found = of.find(tensor); found != of.end()) found->second.add_to(values, first, scale);
}

void AdaptedWeights::read(std::string_view name, std::int64_t first, std::span<float> out) const {
  base_->read(name, first, out);
  adapters_.add_to(name, first, out);
}

}  // namespace transformer
