// SPDX-License-Identifier: Apache-2.0
// The schedule of the learning rate.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

namespace transformer {

/// Linear warm-up, decay to `lowest`, then `lowest`: nanoGPT's schedule, or the same with a linear decay.
struct LearningRate {
  double highest = 0, lowest = 0;
  std::int64_t warmup = 0;  ///< iterations
  std::int64_t end = 0;     ///< iteration at which the rate reaches `lowest`
  bool decays = true;       ///< false: `highest` in every iteration, warm-up included
  bool linear = false;      ///< the decay; otherwise by a cosine

  double at(std::int64_t iteration) const {
    if (!decays) return highest;
    auto const it = static_cast<double>(iteration), first = static_cast<double>(warmup);
    if (iteration < warmup) return highest * (it + 1.0) / (first + 1.0);
    if (iteration > end || end <= warmup) return lowest;
    double const ratio = (it - first) / (static_cast<double>(end) - first);
    if (linear) return lowest + (1.0 - ratio) * (highest - lowest);
    return lowest + 0.5 * (1.0 + std::cos(std::numbers::pi * ratio)) * (highest - lowest);
  }
};

}  // namespace transformer
