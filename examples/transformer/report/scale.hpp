// SPDX-License-Identifier: Apache-2.0
// Scales, ticks and their texts; thins out curves with more points than a screen can show.
#pragma once

#include <cstddef>
#include <limits>
#include <string>
#include <vector>

namespace transformer::report {

/// Whether a value can be drawn: finite, and far from where sums overflow.
bool is_drawn(double value);

/// A point of a curve; a y that cannot be drawn is a gap.
struct Point {
  double x = 0, y = 0;  ///< x: the iteration
  double tokens = std::numeric_limits<double>::quiet_NaN(), seconds = std::numeric_limits<double>::quiet_NaN();
};
using Points = std::vector<Point>;

/// Bounds of values that can be drawn; empty before the first.
struct Range {
  double low = 0, high = 0;
  bool empty = true;
  void add(double value);
};

/// A linear or logarithmic map of a range to pixels.
class Scale {
 public:
  /// @param from,to  pixels of the range's ends; `from` may be the larger
  /// @pre low > 0 for a logarithmic one
  Scale(Range range, double from, double to, bool logarithmic = false);
  double operator()(double value) const;
  Range const& range() const { return range_; }
  bool logarithmic() const { return logarithmic_; }

 private:
  double position(double value) const;
  Range range_;
  double from_, to_;
  bool logarithmic_;
};

/// Whether values are better seen on a logarithmic axis: all positive, and more than tenfold apart.
bool wants_logarithm(Range const& range);

/// The range with a margin, and never of length 0.
Range widened(Range const& range, bool logarithmic, bool from_zero);

struct Tick {
  double value = 0;
  std::string text;
};
/// Round values within the range, `most` at most.
std::vector<Tick> ticks(Range const& range, bool logarithmic, std::size_t most);

/// A number as an axis or a table shows it: 43.6k, 1,250, 0.0035, 2e-05. "-" if it is not finite.
std::string number_text(double value, int digits = 3);
/// 1.61 MB, 23 GB: powers of ten.
std::string bytes_text(double bytes);
/// 3.2 s, 4 min 10 s, 2 h 5 min.
std::string duration_text(double seconds);

/// At most about `most` points that look the same: of as many stretches of x as fit, the lowest and the highest.
Points downsampled(Points const& points, std::size_t most);

/// Each point the mean of its neighbours, as many on either side; fewer near gaps and ends.
/// @param half  neighbours on a side
Points smoothed(Points const& points, std::size_t half);

/// The middle value of the finite ones; NaN without any.
double median(std::vector<double> values);

}  // namespace transformer::report
