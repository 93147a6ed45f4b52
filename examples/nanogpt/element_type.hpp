// SPDX-License-Identifier: Apache-2.0
// The element type that a run computes in: the one that is asked for, that of the run that goes on, or the fastest.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "job.hpp"

namespace nanogpt {

/// What a rank's products on the host do, FLOP per second.
struct ProductRates {
  double fp32 = 0;
  double bf16 = 0;
  std::string why_no_bf16;  ///< empty: it has units for bf16
};

/// How many times as fast as those of fp32 the products of bf16 must be. A step is more than products, and what is not
/// takes longer in bf16 on a host, which rounds every result: a run in bf16 gains less than its products do.
inline constexpr double least_gain_of_bf16 = 1.15;

/// The element type in which ranks with these rates train fastest.
inline std::string_view fastest_type(ProductRates const& rates) {
  bool const faster = rates.why_no_bf16.empty() && rates.bf16 > 0 && rates.bf16 >= least_gain_of_bf16 * rates.fp32;
  return faster ? "bfloat16" : "float32";
}

/// A rank's rates between ranks, as a text.
inline std::string pack(ProductRates const& rates) {
  return fmt::format("{:.17g} {:.17g} {}", rates.fp32, rates.bf16, rates.why_no_bf16);
}

/// What ranks have together: the lowest rates, as a step takes as long as its slowest rank; no bf16 if one has none.
/// @param texts  every rank's, packed: all ranks get the same from the same texts
inline ProductRates slowest_of(std::vector<std::string> const& texts) {
  ProductRates all;
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    ProductRates one;
    std::istringstream stream(texts[rank]);
    stream >> one.fp32 >> one.bf16;
    stream.get();
    std::getline(stream, one.why_no_bf16);
    all.fp32 = rank == 0 ? one.fp32 : std::min(all.fp32, one.fp32);
    all.bf16 = rank == 0 ? one.bf16 : std::min(all.bf16, one.bf16);
    if (all.why_no_bf16.empty() && !one.why_no_bf16.empty())
      all.why_no_bf16 = rank == 0 ? one.why_no_bf16 : fmt::format("rank {}: {}", rank, one.why_no_bf16);
  }
  return all;
}

/// The choice, and what it comes of, for the run's first lines.
inline std::string describe(ProductRates const& rates) {
  auto const type = fastest_type(rates);
  if (!rates.why_no_bf16.empty()) return fmt::format("computes in {}: {}", type, rates.why_no_bf16);
  return fmt::format(
      "computes in {}: products of bfloat16 are {:.2f} times as fast here ({:.0f} against {:.0f} GFLOP/s a rank)", type,
      rates.bf16 / rates.fp32, rates.bf16 / 1e9, rates.fp32 / 1e9);
}

/// Sets the job's type and its note: the setting, or the type of the run that is resumed, or bfloat16 on cuda and
/// float32 on cpu. On cpu `fastest` stays, for take_fastest_type(), unless a resumed run has decided it. What
/// cannot compute in bf16 computes in float32.
/// @pre the job's device is known
/// @throws fsdp::ConfigError unless there is such a computation
void choose_dtype(Job& job);

/// Gives every rank's text to all, in the order of the ranks.
using ExchangeTexts = std::function<std::vector<std::string>(std::string const&)>;

/// Where the job's type is `fastest`: measures this rank's products, for about 0.2 s, and sets the type that all ranks
/// are fastest in together; the job's note says why.
/// @pre the job's type is the same on all ranks, and its threads are known
/// @note Collective: yes, where there is something to measure.
void take_fastest_type(Job& job, ExchangeTexts const& exchange);

}  // namespace nanogpt
