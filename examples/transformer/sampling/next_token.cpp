// SPDX-License-Identifier: Apache-2.0
#include "transformer/sampling/next_token.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <vector>

#include "fsdp/error.hpp"

namespace transformer {
namespace {

struct Candidate {
  std::int32_t id;
  double weight;  ///< its probability, times what is the same for all
};

void expect_finite(std::span<float const> logits) {
  for (std::size_t id = 0; id < logits.size(); ++id)
    if (!std::isfinite(logits[id]))
      fsdp::fail<fsdp::Error>(
          "the model's logit of token {} is {}, so no token can be drawn; the weights are damaged, or training has "
          "diverged",
          id, static_cast<double>(logits[id]));
}

/// The lowest logit that is among the `top_k` highest.
float kth_highest(std::span<float const> logits, std::int64_t top_k) {
  if (top_k >= static_cast<std::int64_t>(logits.size())) return *std::min_element(logits.begin(), logits.end());
  std::vector<float> values(logits.begin(), logits.end());
  auto const kth = values.begin() + static_cast<std::ptrdiff_t>(top_k - 1);
  std::nth_element(values.begin(), kth, values.end(), std::greater<>());
  return *kth;
}

double total_of(std::vector<Candidate> const& candidates) {
  double total = 0;
  for (auto const& each : candidates) total += each.weight;
  return total;
}

/// Drops all but the nucleus.
void keep_nucleus(std::vector<Candidate>& candidates, double top_p) {
  std::sort(candidates.begin(), candidates.end(), [](Candidate const& a, Candidate const& b) {
    return a.weight != b.weight ? a.weight > b.weight : a.id < b.id;
  });
  double const enough = top_p * total_of(candidates);
  double sum = 0;
  std::size_t count = 0;
  while (count < candidates.size() && sum < enough) sum += candidates[count++].weight;
  candidates.resize(std::max<std::size_t>(1, count));
}

}  // namespace

std::int32_t draw_token(std::span<float const> logits, DrawOptions const& options, std::mt19937_64& random) {
  expect_finite(logits);
  auto const highest = std::max_element(logits.begin(), logits.end());
  auto const most_likely = static_cast<std::int32_t>(highest - logits.begin());
  if (options.temperature == 0) return most_likely;

  float const lowest = kth_highest(logits, options.top_k);
  std::vector<Candidate> candidates;
  for (std::size_t id = 0; id < logits.size(); ++id) {
    if (logits[id] < lowest) continue;
    double const below = static_cast<double>(logits[id]) - static_cast<double>(*highest);
    candidates.push_back({static_cast<std::int32_t>(id), std::exp(below / options.temperature)});
  }
  if (options.top_p < 1) keep_nucleus(candidates, options.top_p);

  double left = static_cast<double>(random() >> 11) * 0x1p-53 * total_of(candidates);  // uniform in [0, total)
  for (auto const& each : candidates) {
    left -= each.weight;
    if (left < 0) return each.id;
  }
  return most_likely;  // rounding has left a little of the total over
}

}  // namespace transformer
