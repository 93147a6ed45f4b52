// SPDX-License-Identifier: Apache-2.0
// Curves over iterations, tokens or time.
#pragma once

#include <string>
#include <vector>

#include "transformer/report/scale.hpp"

namespace transformer::report {

struct Curve {
  std::string name;
  std::string css;    ///< classes: the colour (c0 to c5), and what it is (raw, thin, dots)
  Points points;      ///< x ascending
  bool read = true;   ///< what a pointer reads tells its value
  bool dots = false;  ///< each point is marked
  Points logged{};    ///< what a pointer reads where the points are smoothed; else empty
  Points jumps{};     ///< readings that are marked: far above those before them
};

/// The quantity along x.
enum class Axis { iterations, tokens, time };

/// One way to draw a chart.
struct View {
  Axis axis = Axis::iterations;
  bool logarithmic = false;
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

/// Whether there is anything to draw along this axis.
bool has_axis(Chart const& chart, Axis axis);
/// Whether the chart can have a logarithmic scale, and whether it is better seen on one.
bool can_be_logarithmic(Chart const& chart);
bool is_better_logarithmic(Chart const& chart);
/// The unit of x in words: "iterations", "tokens", "minutes".
std::string unit_of_x(Chart const& chart, Axis axis);

/// The chart without its title.
/// @param id  of the page's, for references within the SVG
std::string svg(Chart const& chart, Size size, std::string const& id, View view);

/// The chart's content where another SVG is drawn around it.
std::string drawing(Chart const& chart, Size size, std::string const& id, View view);

/// Values under a pointer, as JSON text for the page's script: for each curve its name and its points
/// [iteration, text of y, tokens, seconds].
std::string readings(Chart const& chart);

/// Whether there is anything to draw.
bool has_points(Chart const& chart);

}  // namespace transformer::report
