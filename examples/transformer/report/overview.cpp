// SPDX-License-Identifier: Apache-2.0
// The picture for a README. It has its own background, because the page around it may be light or dark.
#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "transformer/report/chart.hpp"
#include "transformer/report/curves.hpp"
#include "transformer/report/escape.hpp"
#include "transformer/report/page.hpp"
#include "transformer/report/scale.hpp"
#include "transformer/report/sections.hpp"
#include "transformer/report/style.hpp"
#include "transformer/report/svg.hpp"
#include "transformer/report/timeline.hpp"

namespace transformer::report {
namespace {

std::string moved(double x, double y, std::string const& content) {
  return fmt::format("<g transform=\"translate({} {})\">\n{}</g>\n", px(x), px(y), content);
}

std::string title(double x, double y, std::string const& text, std::string const& note) {
  return text_at("title", x, y, text) + text_at("note", x, y + 19, note);
}

}  // namespace

std::string overview(Material const& material) {
  auto const& run = material.run;
  constexpr double width = 1200, margin = 32, gap = 48;
  double const each = material.trace ? (width - 2 * margin - gap) / 2 : width - 2 * margin;
  auto const figures = figures_of(run);
  std::string content;
  double height = 250;
  auto const ranks = std::max<std::size_t>(run.memory.size(), 1);
  if (material.trace) {
    auto const step = typical_step(*material.trace);
    auto const drawn = timeline_drawing(step, each);
    height = std::max(height, drawn.height);
    auto const share = exposed_communication(material);
    content += title(margin + each + gap, 40, fmt::format("One step on {} ranks", step.ranks.size()),
                     fmt::format("blue: compute; grey: communication behind it; orange: exposed, {} % of the time",
                                 share ? number_text(*share * 100) : "-"));
    content += moved(margin + each + gap, 78 + (height - drawn.height) / 2, drawn.content);
  }
  auto const parameters = run.header.parameters > 0
                              ? number_text(static_cast<double>(run.header.parameters)) + " parameters, "
                              : std::string();
  content += title(margin, 40, fmt::format("Training a GPT, {}", run.header.setting("strategy")),
                   fmt::format("loss by iteration; {}{} rank{}, {} tokens/s", parameters, ranks, ranks == 1 ? "" : "s",
                               number_text(figures.tokens_per_second)));
  auto const losses = loss_chart({&run});
  content +=
      moved(margin, 78, drawing(losses, {each, height}, "loss", {Axis::iterations, is_better_logarithmic(losses)}));
  auto const total = height + 78 + 24;
  auto const ground = fmt::format(
      "<style>{}svg .title {{ font-size: 17px; font-weight: 600; }} svg .note {{ font-size: 13px; fill: var(--soft); "
      "}}\n"
      ".ground {{ fill: var(--raised); stroke: var(--line); }}</style>\n<rect class=\"ground\" x=\"0.5\" y=\"0.5\" "
      "width=\"{}\" height=\"{}\" rx=\"8\"/>\n",
      chart_style(), px(width - 1), px(total - 1));
  return svg_element(width, total, "Losses of a training run, and the timeline of one of its steps", "",
                     ground + content);
}

}  // namespace transformer::report
