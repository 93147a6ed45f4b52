// SPDX-License-Identifier: Apache-2.0
// Elements of an SVG, as text. Their classes are styled in style.hpp.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>

#include "transformer/report/escape.hpp"

namespace transformer::report {

/// A coordinate: a hundredth of a pixel is as fine as any screen.
inline std::string px(double value) {
  auto text = fmt::format("{:.2f}", std::isfinite(value) ? value : 0.0);
  while (text.back() == '0') text.pop_back();
  if (text.back() == '.') text.pop_back();
  return text == "-0" ? "0" : text;
}

/// @param title  what a pointer at rest reads; empty: nothing
inline std::string rect(std::string_view css, double x, double y, double width, double height,
                        std::string_view title = {}) {
  auto const start = fmt::format(R"(<rect class="{}" x="{}" y="{}" width="{}" height="{}")", css, px(x), px(y),
                                 px(std::max(width, 0.0)), px(height));
  if (title.empty()) return start + "/>\n";
  return start + fmt::format("><title>{}</title></rect>\n", escaped(title));
}

inline std::string line(std::string_view css, double x1, double y1, double x2, double y2) {
  return fmt::format("<line class=\"{}\" x1=\"{}\" y1=\"{}\" x2=\"{}\" y2=\"{}\"/>\n", css, px(x1), px(y1), px(x2),
                     px(y2));
}

/// @param anchor  start, middle or end
inline std::string text_at(std::string_view css, double x, double y, std::string_view text,
                           std::string_view anchor = "start") {
  return fmt::format("<text class=\"{}\" x=\"{}\" y=\"{}\" text-anchor=\"{}\">{}</text>\n", css, px(x), px(y), anchor,
                     escaped(text));
}

/// Pixels that a text of the small size takes, roughly: fonts differ.
inline double text_width(std::string_view text) { return 6.4 * static_cast<double>(text.size()); }

/// @param label  what it shows, for those who cannot see it
inline std::string svg_element(double width, double height, std::string_view label, std::string_view attributes,
                               std::string_view content) {
  return fmt::format(
      R"(<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{}" viewBox="0 0 {} {}" width="{}" height="{}"{}{}>)"
      "\n{}</svg>\n",
      escaped(label), px(width), px(height), px(width), px(height), attributes.empty() ? "" : " ", attributes, content);
}

}  // namespace transformer::report
