// SPDX-License-Identifier: Apache-2.0
// Selections of tensors that train, for tests of fine-tuning.
#pragma once

#include <cstdint>

#include "transformer/tuning/tuning.hpp"

namespace model_test {

inline transformer::Tuning adapters(std::int64_t rank) {
  transformer::Tuning tuning;
  tuning.lora_rank = rank;
  tuning.lora_scale = 2.0f;
  return tuning;
}
inline transformer::Tuning last(std::int64_t layers) {
  transformer::Tuning tuning;
  tuning.last_layers = layers;
  return tuning;
}

}  // namespace model_test
