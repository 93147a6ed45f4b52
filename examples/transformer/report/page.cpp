// SPDX-License-Identifier: Apache-2.0
#include "transformer/report/page.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <string_view>
#include <utility>

#include "transformer/launch/program.hpp"
#include "transformer/report/chart.hpp"
#include "transformer/report/curves.hpp"
#include "transformer/report/escape.hpp"
#include "transformer/report/notes.hpp"
#include "transformer/report/sections.hpp"
#include "transformer/report/style.hpp"

namespace transformer::report {
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

/// The text above a chart while no pointer is on it.
/// @param brief  for a narrow chart
std::string caption(Chart const& chart, Axis axis, bool brief) {
  bool const smooth = std::any_of(chart.curves.begin(), chart.curves.end(),
                                  [](Curve const& curve) { return curve.read && !curve.logged.empty(); });
  return chart.unit + (chart.unit.empty() ? "" : ", ") + "by " + unit_of_x(chart, axis) +
         (!smooth ? ""
          : brief ? ", smoothed"
                  : "; the line is smoothed, and the pointer shows the logged values");
}

constexpr std::string_view names_of_axes[] = {"iterations", "tokens", "time"};
constexpr Axis all_axes[] = {Axis::iterations, Axis::tokens, Axis::time};

/// Choices of the page's reader: axes, and logarithmic scales of losses.
struct Choices {
  std::vector<Axis> axes;
  bool scales = false;
  bool logarithmic = false;  ///< that is chosen at first
};

Choices choices_of(Chart const& losses, Chart const& others) {
  Choices choices;
  auto const& chart = has_points(losses) ? losses : others;
  for (auto const axis : all_axes)
    if (axis == Axis::iterations || has_axis(chart, axis)) choices.axes.push_back(axis);
  choices.scales = can_be_logarithmic(losses);
  choices.logarithmic = is_better_logarithmic(losses);
  return choices;
}

std::string radio(std::string_view group, std::string_view id, bool checked) {
  return fmt::format("<input type=\"radio\" name=\"{}\" id=\"{}\"{}/>", group, id,
                     checked ? " checked=\"checked\"" : "");
}

/// Radio buttons, whose states decide by the style which views of the charts below them are shown; no script is needed.
std::string controls(Choices const& choices) {
  std::string inputs, labels;
  for (auto const axis : choices.axes) {
    auto const name = names_of_axes[static_cast<std::size_t>(axis)];
    inputs += radio("x", fmt::format("by-{}", name), axis == Axis::iterations);
    labels += fmt::format("<label for=\"by-{}\">{}</label>", name, name);
  }
  inputs += radio("y", "y-linear", !choices.logarithmic) + radio("y", "y-log", choices.logarithmic);
  auto text = inputs + "\n<div class=\"controls\">";
  if (choices.axes.size() > 1)
    text += fmt::format("<span class=\"set\">by <span class=\"choice\">{}</span></span>", labels);
  if (choices.scales)
    text +=
        "<span class=\"set\">loss <span class=\"choice\"><label for=\"y-linear\">linear</label><label "
        "for=\"y-log\">logarithmic</label></span></span>";
  return text + "</div>\n";
}

/// A chart in all its views and both widths, with a line that a pointer's position fills.
/// @param chooses_scale  false: the scale that fits best, whatever is chosen
std::string figure(Chart const& chart, Choices const& choices, bool chooses_scale, Size wide, Size narrow,
                   std::string const& id) {
  if (!has_points(chart)) return {};
  std::string views;
  for (auto const axis : choices.axes) {
    if (!has_axis(chart, axis)) continue;
    auto const name = names_of_axes[static_cast<std::size_t>(axis)];
    for (bool const logarithmic : {false, true}) {
      if (logarithmic && !chooses_scale) continue;
      View const view{axis, chooses_scale ? logarithmic : is_better_logarithmic(chart)};
      auto const unique = fmt::format("{}-{}{}", id, name, logarithmic ? "-log" : "");
      views += fmt::format(
          "<div class=\"v {} {}\">\n<p class=\"rest\">{}</p>\n<div class=\"wide\">{}</div>\n<div "
          "class=\"small\">{}</div>\n</div>\n",
          name,
          !chooses_scale ? "lin log"
          : logarithmic  ? "log"
                         : "lin",
          escaped(caption(chart, axis, !chooses_scale)), svg(chart, wide, unique + "-wide", view),
          svg(chart, narrow, unique + "-small", view));
    }
  }
  return fmt::format(
      "<figure data-curves=\"{}\">\n<h2>{}</h2>\n<figcaption class=\"read\"></figcaption>\n{}</figure>\n",
      escaped(readings(chart)), escaped(chart.title), views);
}

std::string charts(std::vector<Run const*> const& runs) {
  constexpr Size phone{358, 240}, phone_low{358, 170};
  auto const losses = loss_chart(runs), norms = norm_chart(runs), rates = learning_rate_chart(runs),
             speeds = speed_chart(runs);
  auto const choices = choices_of(losses, speeds);
  auto const text = figure(losses, choices, true, {1040, 380}, phone, "loss");
  std::vector<std::pair<Chart const*, std::string>> low;
  for (auto const& [chart, id] : {std::pair{&norms, "norm"}, std::pair{&rates, "rate"}, std::pair{&speeds, "speed"}})
    if (has_points(*chart)) low.emplace_back(chart, id);
  std::string row;
  for (auto const& [chart, id] : low)
    row += figure(*chart, choices, false, low.size() > 2 ? Size{326, 190} : Size{500, 190}, phone_low, id);
  if (text.empty() && row.empty()) return {};
  if (!row.empty()) row = fmt::format("<div class=\"row of{}\">\n{}</div>\n", low.size() > 2 ? 3 : 2, row);
  return fmt::format("<section class=\"charts\">\n{}{}{}</section>\n", controls(choices), text, row);
}

std::string head(std::string const& title, int reload_seconds) {
  auto const reload = reload_seconds > 0
                          ? fmt::format("<meta http-equiv=\"refresh\" content=\"{}\"/>\n", reload_seconds)
                          : std::string();
  return fmt::format(
      R"(<!DOCTYPE html>
<html lang="en" xmlns="http://www.w3.org/1999/xhtml">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<meta name="color-scheme" content="light dark"/>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"/>
<link rel="icon" href="data:,"/>
{}<title>{}</title>
<style>{}{}</style>
</head>
<body>
)",
      reload, escaped(title), chart_style(), page_style());
}

}  // namespace

std::string page(std::vector<Material> const& materials, int reload_seconds) {
  auto const runs = runs_of(materials);
  auto const title = titles(runs);
  bool const single = runs.size() == 1;
  auto text = head(title, reload_seconds);
  text += fmt::format("<header>\n<h1>{}</h1>\n", escaped(title));
  text += single ? run_line(*runs[0]) + "</header>\n" + tiles(materials[0]) : "</header>\n" + run_table(materials);
  text += charts(runs);
  for (auto const* run : runs) text += notes_section(*run, single ? std::string() : shortened(run->name, 60) + ": ");
  for (auto const* run : runs)
    text += samples_section(*run, single ? std::string() : fmt::format(" of {}", shortened(run->name, 60)));
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
  text += fmt::format(
      "<footer>Written by {} report from {}{}.</footer>\n<script>{}</script>\n</body>\n</html>\n", program_name,
      single ? "the run's log.jsonl" : "the runs' log.jsonl",
      reload_seconds > 0 ? fmt::format("; loaded again every {} s while it is watched", reload_seconds) : std::string(),
      page_script());
  return text;
}

}  // namespace transformer::report
