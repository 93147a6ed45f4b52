// SPDX-License-Identifier: Apache-2.0
// What trains, in tests of fine-tuning.
#pragma once

#include <cstdint>

#include "tuning.hpp"

namespace model_test {

inline nanogpt::Tuning adapters(std::int64_t rank) {
  nanogpt::Tuning tuning;
  tuning.lora_rank = rank;
  tuning.lora_scale = 2.0f;
  return tuning;
}
inline nanogpt::Tuning last(std::int64_t layers) {
  nanogpt::Tuning tuning;
  tuning.last_layers = layers;
  return tuning;
}

}  // namespace model_test
