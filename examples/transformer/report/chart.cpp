// SPDX-License-Identifier: Apache-2.0
#include "transformer/report/chart.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string_view>
#include <vector>

#include "transformer/report/escape.hpp"
#include "transformer/report/svg.hpp"

namespace transformer::report {
namespace {

constexpr std::size_t most_points = 600;        // of a curve
constexpr std::size_t most_points_small = 300;  // where it has the width of a phone

/// Where curves lie within the picture, and how values get there.
struct Frame {
  double left, right, top, bottom;
  Scale x, y;
};

double x_of(Point const& point, Axis axis) {
  return axis == Axis::tokens ? point.tokens : axis == Axis::time ? point.seconds : point.x;
}

Range values_of_x(Chart const& chart, Axis axis) {
  Range range;
  for (auto const& curve : chart.curves)
    for (auto const& point : curve.points) range.add(x_of(point, axis));
  return range;
}

Range range_of_x(Chart const& chart, Axis axis) {
  auto range = values_of_x(chart, axis);
  if (!range.empty && range.high <= range.low) range.low -= 0.5, range.high += 0.5;  // one point
  return range.empty ? Range{0, 1, false} : range;
}

/// The curve that pointers read, if there is one; raw values far from it are cut off.
Range range_of_y(Chart const& chart) {
  Range range, all;
  for (auto const& curve : chart.curves) {
    for (auto const& point : curve.points) {
      all.add(point.y);
      if (curve.read) range.add(point.y);
    }
  }
  return range.empty ? all : range;
}

std::size_t longest_label(Chart const& chart) {
  std::size_t longest = 0;
  for (auto const& curve : chart.curves)
    if (curve.read) longest = std::max(longest, curve.name.size());
  return longest;
}

std::vector<Tick> y_ticks(Range const& range, bool logarithmic) { return ticks(range, logarithmic, 5); }

/// A unit of time that fits a range, in seconds, and its name.
struct TimeUnit {
  double seconds = 1;
  std::string_view name = "seconds";
};
TimeUnit time_unit(Range const& range) {
  if (range.high >= 4 * 86400.0) return {86400, "days"};
  if (range.high >= 3 * 3600.0) return {3600, "hours"};
  if (range.high >= 180) return {60, "minutes"};
  return {};
}

Frame frame_of(Chart const& chart, Size size, View view) {
  auto const y = range_of_y(chart);
  bool const logarithmic = view.logarithmic && can_be_logarithmic(chart);
  double const room = chart.labels ? 10 + 6.6 * static_cast<double>(longest_label(chart)) : 12;
  auto const vertical = widened(y, logarithmic, chart.from_zero);
  std::size_t widest = 3;
  for (auto const& tick : y_ticks(vertical, logarithmic)) widest = std::max(widest, tick.text.size());
  double const left = 12 + 6.4 * static_cast<double>(widest), right = size.width - std::min(room, size.width / 3),
               top = 10, bottom = size.height - 26;
  return {left,
          right,
          top,
          bottom,
          Scale(range_of_x(chart, view.axis), left, right),
          Scale(vertical, bottom, top, logarithmic)};
}

/// Round values along x, with their texts.
std::vector<Tick> x_ticks(Range const& range, Axis axis, std::size_t most) {
  auto const unit = axis == Axis::time ? time_unit(range).seconds : 1;
  auto found = ticks({range.low / unit, range.high / unit, false}, false, most);
  for (auto& tick : found) tick.value *= unit;
  if (axis == Axis::iterations)  // there are whole iterations alone
    std::erase_if(found, [](Tick const& tick) { return tick.value != std::floor(tick.value); });
  return found;
}

std::string axes(Frame const& frame, double width, Axis axis) {
  std::string text;
  for (auto const& tick : y_ticks(frame.y.range(), frame.y.logarithmic())) {
    double const y = frame.y(tick.value);
    text += line("grid", frame.left, y, frame.right, y);
    text += text_at("tick", frame.left - 8, y + 4, tick.text, "end");
  }
  text += line("axis", frame.left, frame.bottom, frame.right, frame.bottom);
  auto const count = static_cast<std::size_t>(std::max(3.0, (frame.right - frame.left) / 110));
  for (auto const& tick : x_ticks(frame.x.range(), axis, count)) {
    double const x = frame.x(tick.value);
    text += line("axis", x, frame.bottom, x, frame.bottom + 4);
    bool const at_edge = x + text_width(tick.text) / 2 > width - 2;
    text += text_at("tick", at_edge ? width - 2 : x, frame.bottom + 18, tick.text, at_edge ? "end" : "middle");
  }
  return text;
}

bool is_visible(Point const& point, Frame const& frame, Axis axis) {
  return is_drawn(point.y) && is_drawn(x_of(point, axis)) && (!frame.y.logarithmic() || point.y > 0);
}

/// A curve as a path; a point between gaps is a short line that round ends make a dot.
std::string path(Curve const& curve, Frame const& frame, Axis axis, std::size_t most) {
  std::string data;
  bool drawing = false;
  for (auto const& point : downsampled(curve.points, most)) {
    if (!is_visible(point, frame, axis)) {
      drawing = false;
      continue;
    }
    auto const x = px(frame.x(x_of(point, axis))), y = px(frame.y(point.y));
    data += drawing ? fmt::format("L{} {}", x, y) : fmt::format("M{} {}h0", x, y);
    drawing = true;
  }
  if (data.empty()) return {};
  return fmt::format("<path class=\"curve {}\" d=\"{}\"/>\n", curve.css, data);
}

std::string dots(Points const& points, std::string_view css, Frame const& frame, Axis axis, double radius) {
  std::string text;
  for (auto const& point : downsampled(points, 60))
    if (is_visible(point, frame, axis))
      text += fmt::format("<circle class=\"{}\" cx=\"{}\" cy=\"{}\" r=\"{}\"/>\n", css, px(frame.x(x_of(point, axis))),
                          px(std::max(frame.y(point.y), frame.top)), px(radius));
  return text;
}

/// Names at the ends of curves, moved apart where they would cover each other.
std::string labels(Chart const& chart, Frame const& frame, Axis axis) {
  struct Label {
    Curve const* curve;
    double x, y;
  };
  std::vector<Label> placed;
  for (auto const& curve : chart.curves) {
    if (!curve.read) continue;
    auto const last = std::find_if(curve.points.rbegin(), curve.points.rend(),
                                   [&](Point const& point) { return is_visible(point, frame, axis); });
    if (last != curve.points.rend()) placed.push_back({&curve, frame.x(x_of(*last, axis)), frame.y(last->y)});
  }
  std::sort(placed.begin(), placed.end(), [](Label const& a, Label const& b) { return a.y < b.y; });
  constexpr double apart = 15;
  for (std::size_t i = 1; i < placed.size(); ++i) placed[i].y = std::max(placed[i].y, placed[i - 1].y + apart);
  double limit = frame.bottom - 2;
  for (auto at = placed.size(); at-- > 0; limit -= apart) placed[at].y = std::min(placed[at].y, limit);
  std::string text;
  for (auto const& label : placed)
    text += text_at("label " + label.curve->css, frame.right + 8, label.y + 4, label.curve->name);
  return text;
}

}  // namespace

bool has_points(Chart const& chart) {
  for (auto const& curve : chart.curves)
    for (auto const& point : curve.points)
      if (is_drawn(point.y)) return true;
  return false;
}

bool has_axis(Chart const& chart, Axis axis) {
  auto const range = values_of_x(chart, axis);
  return !range.empty && (axis == Axis::iterations || range.high > 0);
}

bool can_be_logarithmic(Chart const& chart) {
  auto const range = range_of_y(chart);
  return chart.may_be_logarithmic && !range.empty && range.low > 1e-100 && range.high > range.low;
}

bool is_better_logarithmic(Chart const& chart) {
  return can_be_logarithmic(chart) && wants_logarithm(range_of_y(chart));
}

std::string unit_of_x(Chart const& chart, Axis axis) {
  if (axis == Axis::iterations) return "iterations";
  if (axis == Axis::tokens) return "tokens";
  return std::string(time_unit(range_of_x(chart, axis)).name);
}

std::string drawing(Chart const& chart, Size size, std::string const& id, View view) {
  auto const frame = frame_of(chart, size, view);
  auto const most = size.width < 400 ? most_points_small : most_points;
  auto text = axes(frame, size.width, view.axis);
  text += fmt::format(R"(<clipPath id="{}"><rect x="{}" y="{}" width="{}" height="{}"/></clipPath>)", escaped(id),
                      px(frame.left), px(frame.top - 4), px(frame.right - frame.left + 4),
                      px(frame.bottom - frame.top + 4));
  text += fmt::format("\n<g clip-path=\"url(#{})\">\n", escaped(id));
  for (auto const& curve : chart.curves) text += path(curve, frame, view.axis, most);
  for (auto const& curve : chart.curves)
    if (curve.dots) text += dots(curve.points, curve.css, frame, view.axis, 3);
  text += "</g>\n";
  for (auto const& curve : chart.curves) text += dots(curve.jumps, "jump " + curve.css, frame, view.axis, 5);
  if (chart.labels) text += labels(chart, frame, view.axis);
  return text;
}

std::string svg(Chart const& chart, Size size, std::string const& id, View view) {
  auto const frame = frame_of(chart, size, view);
  auto const data = fmt::format(
      R"(data-axis="{}" data-left="{}" data-right="{}" data-top="{}" data-bottom="{}" data-low="{}" data-high="{}")",
      static_cast<int>(view.axis), px(frame.left), px(frame.right), px(frame.top), px(frame.bottom),
      frame.x.range().low, frame.x.range().high);
  auto const cursor = line("cursor", -9, frame.top, -9, frame.bottom);
  auto const label = fmt::format("{}{}{}, by {}", chart.title, chart.unit.empty() ? "" : ", ", chart.unit,
                                 unit_of_x(chart, view.axis));
  return svg_element(size.width, size.height, label, data, drawing(chart, size, id, view) + cursor);
}

std::string readings(Chart const& chart) {
  // As few digits as tell one point from its neighbours.
  auto const known = [](double value) { return is_drawn(value) ? fmt::format("{:.6g}", value) : std::string("null"); };
  std::string text = "[";
  for (auto const& curve : chart.curves) {
    if (!curve.read) continue;
    std::string values;
    for (auto const& point : downsampled(curve.logged.empty() ? curve.points : curve.logged, most_points))
      if (is_drawn(point.y))
        values += fmt::format("{}[{},{},{},{}]", values.empty() ? "" : ",", point.x,
                              script_text(number_text(point.y, 4)), known(point.tokens), known(point.seconds));
    if (values.empty()) continue;
    text +=
        fmt::format("{}{{\"name\":{},\"points\":[{}]}}", text.size() > 1 ? "," : "", script_text(curve.name), values);
  }
  return text + "]";
}

}  // namespace transformer::report
