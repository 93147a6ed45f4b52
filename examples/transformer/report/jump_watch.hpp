// SPDX-License-Identifier: Apache-2.0
// A loss or a gradient norm that suddenly stands far above those before it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace transformer {

/// One reading that jumped.
struct Jump {
  std::int64_t iteration = 0;
  double value = 0;
  double median = 0;   ///< of the readings before it
  std::size_t of = 0;  ///< how many these are
};

/// Watches one series of readings. A reading jumps if both hold:
///  - it is more than `factor` times the median of the readings before it (the last 100; at least 20 are needed);
///  - it is more than 10 median absolute deviations above that median, so that a noisy series stays quiet.
/// Only the first of several such readings in a row is a jump.
class JumpWatch {
 public:
  static constexpr std::size_t window = 100, least = 20;
  static constexpr double deviations = 10;

  explicit JumpWatch(double factor) : factor_(factor) {}

  /// Enters a finite reading. @return it, if it jumps
  std::optional<Jump> add(std::int64_t iteration, double value);

 private:
  double factor_;
  std::array<double, window> readings_{};
  std::size_t count_ = 0;  ///< entered so far
  bool above_ = false;     ///< the last reading was far above too
};

/// "note: iteration 812: the loss jumps to 6.1034, the median of the last 100 is 3.2904".
/// @param name  of the series, as "loss"
std::string text_of(Jump const& jump, std::string_view name);

}  // namespace transformer
