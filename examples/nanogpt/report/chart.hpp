// SPDX-License-Identifier: Apache-2.0
// Curves over iterations.
#pragma once

#include <string>
#include <vector>

#include "report/scale.hpp"

namespace nanogpt::report {

struct Curve {
  std::string name;
  std::string css;    ///< classes: the colour (c0 to c5), and what it is (raw, thin, dots)
  Points points;      ///< x ascending
  bool read = true;   ///< what a pointer reads tells its value
  bool dots = false;  ///< each point is marked
  Points logged{};    ///< what a pointer reads where the points are smoothed; else empty
};

struct Chart {
  std::string title;
  std::string unit;  ///< of y
  std::vector<Curve> curves;
  bool from_zero = false;
  bool may_be_logarithmic = false;  ///< where values differ much
  bool labels = true;               ///< names stand at the curves' ends
};

/// Pixels.
struct Size {
  double width = 0, height = 0;
};

/// The chart without its title.
/// @param id  of the page's, for references within the SVG
std::string svg(Chart const& chart, Size size, std::string const& id);

/// The chart's content where another SVG is drawn around it.
std::string drawing(Chart const& chart, Size size, std::string const& id);

/// What a pointer reads, as the JSON text that the page's script expects.
std::string readings(Chart const& chart);

/// Whether there is anything to draw.
bool has_points(Chart const& chart);

}  // namespace nanogpt::report
