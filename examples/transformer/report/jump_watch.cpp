// SPDX-License-Identifier: Apache-2.0
#include "transformer/report/jump_watch.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace transformer {
namespace {

using Readings = std::array<double, JumpWatch::window>;

/// The middle one of the first `count`; the upper one of two.
double middle(Readings& values, std::size_t count) {
  auto const at = values.begin() + static_cast<std::ptrdiff_t>(count / 2);
  std::nth_element(values.begin(), at, values.begin() + static_cast<std::ptrdiff_t>(count));
  return *at;
}

}  // namespace

std::optional<Jump> JumpWatch::add(std::int64_t iteration, double value) {
  std::optional<Jump> jump;
  if (auto const count = std::min(count_, window); count >= least) {
    auto values = readings_;
    double const median = middle(values, count);
    for (auto& reading : values) reading = std::abs(reading - median);
    bool const above = value > factor_ * median && value > median + deviations * middle(values, count);
    if (above && !std::exchange(above_, above)) jump = Jump{iteration, value, median, count};
    above_ = above;
  }
  readings_[count_++ % window] = value;
  return jump;
}

std::string text_of(Jump const& jump, std::string_view name) {
  return fmt::format("note: iteration {}: the {} jumps to {:.4f}, the median of the last {} is {:.4f}", jump.iteration,
                     name, jump.value, jump.of, jump.median);
}

}  // namespace transformer
