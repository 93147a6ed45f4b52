// SPDX-License-Identifier: Apache-2.0
#include "report/page.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <string_view>
#include <utility>

#include "report/chart.hpp"
#include "report/curves.hpp"
#include "report/escape.hpp"
#include "report/sections.hpp"
#include "report/style.hpp"

namespace nanogpt::report {
namespace {

constexpr std::size_t most_detailed = 4;  ///< runs whose memory and timeline are drawn

std::vector<Run const*> runs_of(std::vector<Material> const& materials) {
  std::vector<Run const*> runs;
  for (auto const& material : materials) runs.push_back(&material.run);
  return runs;
}

std::string titles(std::vector<Run const*> const& runs) {
  std::string text;
  for (auto const* run : runs) text += (text.empty() ? "" : ", ") + shortened(run->name, 60);
  return shortened(text, 160);
}

/// What stands above a chart while no pointer reads it.
std::string by_iteration(Chart const& chart) {
  bool const smooth = std::any_of(chart.curves.begin(), chart.curves.end(),
                                  [](Curve const& curve) { return curve.read && !curve.logged.empty(); });
  return chart.unit + (chart.unit.empty() ? "" : ", ") + "by iteration" +
         (smooth ? "; the line is smoothed, a pointer reads what was logged" : "");
}

/// A chart in both widths, with a line that a pointer's position fills.
std::string figure(Chart const& chart, Size wide, Size narrow, std::string const& id) {
  if (!has_points(chart)) return {};
  return fmt::format(
      "<figure data-curves=\"{}\">\n<h2>{}</h2>\n<figcaption class=\"read\" data-rest=\"{}\"></figcaption>\n"
      "<div class=\"wide\">{}</div>\n<div class=\"small\">{}</div>\n</figure>\n",
      escaped(readings(chart)), escaped(chart.title), escaped(by_iteration(chart)), svg(chart, wide, id + "-wide"),
      svg(chart, narrow, id + "-small"));
}

std::string charts(std::vector<Run const*> const& runs) {
  constexpr Size phone{358, 240}, phone_low{358, 170};
  auto text = figure(loss_chart(runs), {1040, 380}, phone, "loss");
  auto const rate = figure(learning_rate_chart(runs), {500, 190}, phone_low, "rate");
  auto const speed = figure(speed_chart(runs), {500, 190}, phone_low, "speed");
  if (!rate.empty() || !speed.empty()) text += fmt::format("<div class=\"pair\">\n{}{}</div>\n", rate, speed);
  return text;
}

std::string head(std::string const& title) {
  return fmt::format(
      R"(<!DOCTYPE html>
<html lang="en" xmlns="http://www.w3.org/1999/xhtml">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<meta name="color-scheme" content="light dark"/>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"/>
<link rel="icon" href="data:,"/>
<title>{}</title>
<style>{}{}</style>
</head>
<body>
)",
      escaped(title), chart_style(), page_style());
}

}  // namespace

std::string page(std::vector<Material> const& materials) {
  auto const runs = runs_of(materials);
  auto const title = titles(runs);
  bool const single = runs.size() == 1;
  auto text = head(title);
  text += fmt::format("<header>\n<h1>{}</h1>\n", escaped(title));
  text += single ? run_line(*runs[0]) + "</header>\n" + tiles(materials[0]) : "</header>\n" + run_table(materials);
  text += charts(runs);
  for (std::size_t i = 0; i < std::min(materials.size(), most_detailed); ++i) {
    auto const& material = materials[i];
    auto const of = single ? std::string() : fmt::format(" of {}", shortened(material.run.name, 60));
    text += memory_section(material.run, of) + step_section(material, of);
  }
  if (materials.size() > most_detailed)
    text += fmt::format("<p class=\"say\">Memory and timelines are those of the first {} runs.</p>\n", most_detailed);
  text += single ? settings_section(*runs[0]) : differences_section(runs);
  for (auto const* run : runs)
    text += environment_section(*run, single ? std::string() : fmt::format(" of {}", shortened(run->name, 60)));
  text += fmt::format("<footer>Written by nanogpt report from {}.</footer>\n<script>{}</script>\n</body>\n</html>\n",
                      single ? "the run's log.jsonl" : "the runs' log.jsonl", page_script());
  return text;
}

}  // namespace nanogpt::report
