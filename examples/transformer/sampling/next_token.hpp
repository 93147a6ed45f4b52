// SPDX-License-Identifier: Apache-2.0
// The choice of the next token from a model's logits.
#pragma once

#include <cstdint>
#include <limits>
#include <random>
#include <span>

namespace transformer {

/// From which tokens the next one is drawn, and with which probabilities.
struct DrawOptions {
  double temperature = 1;  ///< divides the logits; 0: always the most likely token, the lowest id of several
  /// Only the k most likely tokens, and those that are as likely as the k-th.
  std::int64_t top_k = std::numeric_limits<std::int64_t>::max();
  /// Keeps the fewest most likely tokens whose probability reaches this part of the total: nucleus sampling
  /// (Holtzman et al., The Curious Case of Neural Text Degeneration, 2019). The lowest ids of those that are alike.
  double top_p = 1;
};

/// Draws a token. Takes one number from `random`, at temperature 0 none.
/// @param logits  (V), V >= 1
/// @throws fsdp::Error naming the first logit that is not finite: weights are damaged, or training has diverged
std::int32_t draw_token(std::span<float const> logits, DrawOptions const& options, std::mt19937_64& random);

}  // namespace transformer
