// SPDX-License-Identifier: Apache-2.0
#include "transformer/report/scale.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string_view>
#include <utility>

namespace transformer::report {
namespace {

/// "1.500" as "1.5", "20.0" as "20".
std::string without_zeros(std::string text) {
  if (text.find('.') == std::string::npos) return text;
  while (text.back() == '0') text.pop_back();
  if (text.back() == '.') text.pop_back();
  return text;
}

/// A value with three significant digits and a unit of a thousand, a million, ...
std::string scaled(double value, std::string_view separator, std::array<std::string_view, 5> const& units) {
  std::size_t unit = 0;
  while (std::abs(value) >= 999.5 && unit + 1 < units.size()) value /= 1000, ++unit;
  int const decimals = unit == 0 ? 0 : std::abs(value) < 9.995 ? 2 : std::abs(value) < 99.95 ? 1 : 0;
  auto const separated = units[unit].empty() ? std::string_view() : separator;
  return without_zeros(fmt::format("{:.{}f}", value, decimals)) + fmt::format("{}{}", separated, units[unit]);
}

std::string grouped(double value) {
  auto text = fmt::format("{:.0f}", value);
  std::size_t const first = value < 0 ? 1 : 0;
  for (auto at = text.size(); at > first + 3; at -= 3) text.insert(at - 3, 1, ',');
  return text;
}

/// The smallest of 1, 2, 5, 10, ... that makes at most `most` steps of the length.
double round_step(double length, std::size_t most) {
  double const least = length / static_cast<double>(std::max<std::size_t>(most, 1));
  double const power = std::pow(10.0, std::floor(std::log10(least)));
  for (double const factor : {1.0, 2.0, 5.0})
    if (factor * power >= least * (1 - 1e-9)) return factor * power;
  return 10 * power;
}

/// As many decimals as the step needs.
std::string tick_text(double value, double step) {
  if (std::abs(value) < step * 1e-6) return "0";
  if (std::abs(value) >= 10000) return number_text(value);
  if (std::abs(value) >= 1000) return grouped(value);
  if (step < 0.00095) return number_text(value);
  return fmt::format("{:.{}f}", value, std::max(0, static_cast<int>(std::ceil(-std::log10(step) - 1e-9))));
}

}  // namespace

bool is_drawn(double value) { return std::isfinite(value) && std::abs(value) < 1e100; }

void Range::add(double value) {
  if (!is_drawn(value)) return;
  low = empty ? value : std::min(low, value);
  high = empty ? value : std::max(high, value);
  empty = false;
}

Scale::Scale(Range range, double from, double to, bool logarithmic)
    : range_(range), from_(from), to_(to), logarithmic_(logarithmic) {}

double Scale::position(double value) const { return logarithmic_ ? std::log(value) : value; }

double Scale::operator()(double value) const {
  double const low = position(range_.low), high = position(range_.high);
  return from_ + (to_ - from_) * (position(value) - low) / (high - low);
}

bool wants_logarithm(Range const& range) { return !range.empty && range.low > 1e-100 && range.high > 10 * range.low; }

Range widened(Range const& range, bool logarithmic, bool from_zero) {
  if (range.empty) return {0, 1, false};
  if (logarithmic) {
    double const factor = std::pow(range.high / range.low, 0.06);
    return {range.low / factor, range.high * factor, false};
  }
  auto [low, high, empty] = range;
  if (from_zero) low = std::min(low, 0.0), high = std::max(high, 0.0);
  double const length = high > low ? high - low : std::max(std::abs(high), 1e-300);
  bool const at_zero = from_zero && low == 0;
  low -= at_zero ? 0 : 0.06 * length;
  return {low, high + 0.06 * length, false};
}

std::vector<Tick> ticks(Range const& range, bool logarithmic, std::size_t most) {
  std::vector<Tick> found;
  double const decades = logarithmic ? std::log10(range.high / range.low) : 0;
  if (!logarithmic || decades < 1) {
    double const step = round_step(range.high - range.low, most);
    for (double at = std::ceil(range.low / step - 1e-9); at * step <= range.high * (1 + 1e-12) + step * 1e-9; ++at) {
      found.push_back({at * step, tick_text(at * step, step)});
      if (found.size() > most + 1) break;
    }
    return found;
  }
  auto const first = static_cast<int>(std::floor(std::log10(range.low)));
  auto const last = static_cast<int>(std::ceil(std::log10(range.high)));
  auto const collect = [&](std::initializer_list<double> factors, int stride) {
    found.clear();
    for (int power = first; power <= last; power += stride)
      for (double const factor : factors)
        if (double const value = factor * std::pow(10.0, power); value >= range.low && value <= range.high)
          found.push_back({value, number_text(value)});
    return found.size() <= most;
  };
  if (collect({1, 2, 5}, 1) || collect({1, 3}, 1)) return found;
  for (int stride = 1; !collect({1}, stride); ++stride) {
  }
  return found;
}

std::string number_text(double value, int digits) {
  if (!std::isfinite(value)) return "-";
  double const size = std::abs(value);
  if (size == 0) return "0";
  if (size < 0.001) return fmt::format("{:.{}g}", value, digits);
  if (size < 999.5)
    return without_zeros(fmt::format("{:.{}f}", value,
                                     std::max(0, digits - (size < 1     ? 0
                                                           : size < 10  ? 1
                                                           : size < 100 ? 2
                                                                        : 3))));
  if (size < 9999.5) return grouped(value);
  if (size >= 1e15) return fmt::format("{:.{}g}", value, digits);
  return scaled(value, "", {"", "k", "M", "G", "T"});
}

std::string bytes_text(double bytes) { return scaled(bytes, " ", {"B", "kB", "MB", "GB", "TB"}); }

std::string duration_text(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0) return "-";
  if (seconds < 100) return fmt::format("{} s", number_text(seconds));
  if (seconds > 1e12) return fmt::format("{:.3g} s", seconds);
  auto const whole = std::llround(seconds);
  if (whole < 3600) return fmt::format("{} min {} s", whole / 60, whole % 60);
  return fmt::format("{} h {} min", whole / 3600, whole % 3600 / 60);
}

Points downsampled(Points const& points, std::size_t most) {
  if (points.size() <= most || most < 4) return points;
  Points fewer;
  auto const stretches = most / 2;
  for (std::size_t stretch = 0; stretch < stretches; ++stretch) {
    auto const begin = points.begin() + static_cast<std::ptrdiff_t>(points.size() * stretch / stretches);
    auto const end = points.begin() + static_cast<std::ptrdiff_t>(points.size() * (stretch + 1) / stretches);
    auto lowest = end, highest = end;
    for (auto at = begin; at != end; ++at) {
      if (!is_drawn(at->y)) continue;
      if (lowest == end || at->y < lowest->y) lowest = at;
      if (highest == end || at->y > highest->y) highest = at;
    }
    if (lowest == end) {
      fewer.push_back(*begin);  // a gap
      continue;
    }
    fewer.push_back(*std::min(lowest, highest));
    if (lowest != highest) fewer.push_back(*std::max(lowest, highest));
  }
  return fewer;
}

Points smoothed(Points const& points, std::size_t half) {
  Points means = points;
  for (std::size_t begin = 0; begin < points.size();) {
    if (!is_drawn(points[begin].y)) {
      ++begin;
      continue;
    }
    auto end = begin;  // of a stretch without gaps
    std::vector<double> sums{0.0};
    for (; end < points.size() && is_drawn(points[end].y); ++end) sums.push_back(sums.back() + points[end].y);
    for (auto at = begin; at < end; ++at) {
      auto const side = std::min({half, at - begin, end - 1 - at});
      double const sum = sums[at + side + 1 - begin] - sums[at - side - begin];
      means[at].y = sum / static_cast<double>(2 * side + 1);
    }
    begin = end;
  }
  return means;
}

double median(std::vector<double> values) {
  values.erase(std::remove_if(values.begin(), values.end(), [](double value) { return !std::isfinite(value); }),
               values.end());
  if (values.empty()) return std::numeric_limits<double>::quiet_NaN();
  auto const middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace transformer::report
