// SPDX-License-Identifier: Apache-2.0
// Sections on memory and on time: bars, lanes, and tables of their figures.
#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "transformer/report/escape.hpp"
#include "transformer/report/memory_bars.hpp"
#include "transformer/report/scale.hpp"
#include "transformer/report/sections.hpp"
#include "transformer/report/timeline.hpp"

namespace transformer::report {
namespace {

constexpr double wide = 1040, narrow = 358;

std::string both(std::string const& large, std::string const& small) {
  return fmt::format("<div class=\"wide\">{}</div>\n<div class=\"small\">{}</div>\n", large, small);
}

std::string number_cell(std::string const& value) { return fmt::format("<td class=\"number\">{}</td>", value); }

std::string key(std::initializer_list<std::pair<std::string_view, std::string_view>> entries) {
  std::string items;
  for (auto const& [colour, name] : entries)
    items += fmt::format("<li><span class=\"swatch\" style=\"background:var(--{})\"></span>{}</li>", colour, name);
  return fmt::format("<ul class=\"key\">{}</ul>\n", items);
}

/// A row for each kind: planned, and the least and the most of the ranks.
std::string memory_table(Run const& run) {
  auto const row = [&](std::string const& name, double planned, double least, double most) {
    bool const equal = bytes_text(least) == bytes_text(most);
    return fmt::format("<th scope=\"row\">{}</th>{}{}", name, number_cell(planned > 0 ? bytes_text(planned) : "-"),
                       number_cell(equal ? bytes_text(most) : bytes_text(least) + " to " + bytes_text(most)));
  };
  auto const over_ranks = [&](auto value) {
    Range range;
    for (auto const& rank : run.memory) range.add(static_cast<double>(value(rank)));
    return range;
  };
  std::string rows;
  for (std::size_t tag = 0; tag < run.header.plan.size(); ++tag) {
    auto const planned = static_cast<double>(run.header.plan[tag]);
    auto const range = over_ranks([&](Memory const& rank) { return rank.reserved[tag]; });
    if (planned <= 0 && range.high <= 0) continue;
    auto const swatch = fmt::format("<span class=\"swatch\" style=\"background:var(--m{})\"></span>{}", tag,
                                    fsdp::memory_tag_names[tag]);
    rows += "<tr>" + row(swatch, planned, range.low, range.high) + "</tr>\n";
  }
  auto const state = over_ranks([](Memory const& rank) { return planned_bytes(rank.reserved); });
  auto const peak = over_ranks([](Memory const& rank) { return rank.peak_state; });
  auto const total = over_ranks([](Memory const& rank) { return total_bytes(rank.reserved); });
  rows += "<tr class=\"sum\">" +
          row("planned by the library", static_cast<double>(planned_bytes(run.header.plan)), state.low, state.high) +
          "</tr>\n";
  if (peak.high > 0) rows += "<tr>" + row("peak", 0, peak.low, peak.high) + "</tr>\n";
  rows += "<tr class=\"sum\">" + row("all", 0, total.low, total.high) + "</tr>\n";
  return fmt::format(
      "<table class=\"kinds\"><thead><tr><th scope=\"col\">kind</th><th scope=\"col\" class=\"number\">planned</th><th "
      "scope=\"col\" "
      "class=\"number\">reserved</th></tr></thead><tbody>\n{}</tbody></table>\n",
      rows);
}

std::string overlap_table(std::vector<fsdp::OverlapReport> const& ranks) {
  std::string rows;
  for (std::size_t rank = 0; rank < std::min(ranks.size(), most_ranks_drawn); ++rank) {
    auto const& r = ranks[rank];
    if (r.steps == 0) continue;
    double const scale = 1e3 / static_cast<double>(r.steps);
    auto const ms = [&](double seconds) { return number_cell(number_text(seconds * scale)); };
    rows += fmt::format("<tr><th scope=\"row\">{}</th>{}{}{}{}{}</tr>\n", rank, ms(r.wall), ms(r.compute),
                        ms(r.communication), ms(r.exposed),
                        number_cell(r.wall > 0 ? number_text(r.exposed / r.wall * 100) + " %" : "-"));
  }
  return fmt::format(
      "<table class=\"times\"><thead><tr><th scope=\"col\">rank</th><th scope=\"col\" class=\"number\">step</th><th "
      "scope=\"col\" class=\"number\">compute</th><th scope=\"col\" class=\"number\">comm.</th><th scope=\"col\" "
      "class=\"number\">exposed</th><th scope=\"col\" class=\"number\">share</th></tr></thead><tbody>\n{}"
      "</tbody></table>\n",
      rows);
}

/// "Exposed 11.06 ms a step (43.2 % of it): 0.039 ms after the last backward (unavoidable), 11.02 ms elsewhere.", means
/// of the ranks. Empty without steps.
std::string exposed_text(std::vector<fsdp::OverlapReport> const& ranks) {
  double wall = 0, exposed = 0, last = 0, counted = 0;
  for (auto const& rank : ranks) {
    if (rank.steps == 0) continue;
    double const scale = 1e3 / static_cast<double>(rank.steps);
    wall += rank.wall * scale, exposed += rank.exposed * scale, last += rank.final_reduction * scale, ++counted;
  }
  if (wall <= 0) return {};
  auto const ms = [&](double sum) { return number_text(sum / counted); };
  return fmt::format(
      " Exposed {} ms a step ({} % of it): {} ms after the last backward (unavoidable), {} ms elsewhere. Exposed: "
      "compute waits for communication.",
      ms(exposed), number_text(exposed / wall * 100), ms(last), ms(exposed - last));
}

std::string program_part(Run const& run) {
  if (run.header.program.empty()) return {};
  return fmt::format(
      "<div><h2>Program</h2>\n<p class=\"say\">Actions of the engine before and after each module.</p>\n<pre "
      "tabindex=\"0\">{}</pre></div>\n",
      escaped(shortened(run.header.program, 60000)));
}

}  // namespace

std::optional<double> exposed_communication(Material const& material) {
  if (!material.trace) return std::nullopt;
  double exposed = 0, wall = 0;
  for (auto const& rank : overlap_of(*material.trace)) exposed += rank.exposed, wall += rank.wall;
  if (wall <= 0) return std::nullopt;
  return exposed / wall;
}

std::string memory_section(Run const& run, std::string const& of) {
  if (!has_memory(run)) return {};
  auto const ranks = run.memory.size();
  auto const say = ranks == 0 ? std::string("The plan. The run has not logged the memory that it reserved.")
                   : ranks <= 8
                       ? std::string("Reserved by each rank, below the plan that the library made before training.")
                       : fmt::format("The first 8 of {} ranks; the table has them all.", ranks);
  return fmt::format("<figure><h2>Memory{}</h2>\n<p class=\"say\">{}</p>\n{}{}</figure>\n", escaped(of), say,
                     both(memory_svg(run, wide), memory_svg(run, narrow)),
                     ranks == 0 ? std::string() : memory_table(run));
}

std::string step_section(Material const& material, std::string const& of) {
  auto const program = program_part(material.run);
  if (!material.trace) {
    auto const missing = material.trace_missing.empty()
                             ? std::string()
                             : fmt::format("<h2>Step{}</h2>\n<p class=\"say\">{}</p>\n", escaped(of),
                                           escaped(shortened(material.trace_missing, 400)));
    return program.empty() && missing.empty() ? program : fmt::format("<section>{}{}</section>\n", missing, program);
  }
  auto const& trace = *material.trace;
  auto const step = typical_step(trace);
  auto const overlap = overlap_of(trace);
  auto const steps = overlap.empty() ? 0 : overlap[0].steps;
  auto say = fmt::format("Iteration {}{}.{}", number_text(static_cast<double>(step.step)),
                         steps > 1 ? ", the traced step of median length" : "", exposed_text(overlap));
  if (trace.ranks.size() > most_ranks_drawn)
    say += fmt::format(" The first {} of {} ranks.", most_ranks_drawn, trace.ranks.size());
  if (trace.cut) say += " The trace holds more than was read.";
  auto const table = overlap_table(overlap);
  return fmt::format(
      "<section><figure><h2>Step{}</h2>\n<p class=\"say\">{}</p>\n{}{}</figure>\n<div class=\"pair program\">"
      "<div><h2>Time of a step</h2>\n<p class=\"say\">Milliseconds, means of the traced steps; the share is what "
      "the exposed time takes of a step.</p>{}</div>\n{}</div>"
      "</section>\n",
      escaped(of), escaped(say),
      key({{"forward", "forward"},
           {"backward", "backward"},
           {"update", "optimizer"},
           {"moved", "communication, hidden"},
           {"exposed", "communication, exposed"}}),
      both(timeline_svg(step, wide), timeline_svg(step, narrow)), table, program);
}

}  // namespace transformer::report
