// SPDX-License-Identifier: Apache-2.0
#include "transformer/report/sections.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>
#include <string_view>
#include <utility>

#include "transformer/report/curves.hpp"
#include "transformer/report/escape.hpp"
#include "transformer/report/scale.hpp"

namespace transformer::report {
namespace {

/// 2026-01-31T12:00:00Z as "2026-01-31 12:00 UTC"; another text as it is.
std::string moment(std::string const& started) {
  if (started.size() != 20 || started[10] != 'T' || started[19] != 'Z') return started;
  return started.substr(0, 10) + " " + started.substr(11, 5) + " UTC";
}

std::string environment(Run const& run, std::string_view name) {
  for (auto const& [key, value] : run.header.environment)
    if (key == name) return value;
  return {};
}

/// Long names may be broken behind an underscore.
std::string breakable(std::string text) {
  for (auto at = text.find('_'); at != std::string::npos; at = text.find('_', at + 1)) text.insert(at + 1, "<wbr/>");
  return text;
}

std::string row(std::string_view name, std::string_view value) {
  return fmt::format("<tr><th scope=\"row\">{}</th><td>{}</td></tr>\n", breakable(escaped(name)),
                     escaped(shortened(value, 4000)));
}

std::string pairs(std::string const& rows) {
  return rows.empty() ? std::string() : fmt::format("<table class=\"pairs\"><tbody>\n{}</tbody></table>\n", rows);
}

std::string folded(std::string_view summary, std::string const& content) {
  if (content.empty()) return {};
  return fmt::format("<details><summary>{}</summary>\n{}</details>\n", escaped(summary), content);
}

bool was_given(Run const& run, std::string const& name) {
  auto const& given = run.header.given;
  return std::find(given.begin(), given.end(), name) != given.end();
}

/// A table of the given settings, or of the others.
std::string setting_rows(Run const& run, bool given) {
  std::string rows;
  for (auto const& [name, value] : run.header.settings)
    if (was_given(run, name) == given) rows += row(name, value);
  return rows;
}

std::string tile(std::string_view name, std::string const& value, std::string const& note) {
  if (value == "-" || value.empty()) return {};
  return fmt::format("<div><dt>{}</dt><dd>{}{}</dd></div>\n", escaped(name), escaped(value),
                     note.empty() ? std::string() : fmt::format("<small>{}</small>", escaped(note)));
}

std::string percent(double fraction) { return std::isfinite(fraction) ? number_text(fraction * 100) + " %" : "-"; }

std::string cell(std::string_view name, std::string const& value) {
  return fmt::format("<td class=\"number\" data-name=\"{}\">{}</td>", escaped(name), escaped(value));
}

}  // namespace

std::string run_line(Run const& run) {
  auto const& header = run.header;
  std::vector<std::string> parts;
  if (header.parameters > 0) parts.push_back(number_text(static_cast<double>(header.parameters)) + " parameters");
  if (auto const layers = header.setting("n_layer"); !layers.empty())
    parts.push_back(fmt::format("{} layers of width {}", layers, header.setting("n_embd")));
  for (auto const* const name : {"strategy", "ranks", "device", "dtype"})
    if (auto const text = environment(run, name); !text.empty()) parts.push_back(text);
  if (header.started.size() == 20) parts.push_back(moment(header.started));
  if (run.starts > 1) parts.push_back(fmt::format("started {} times", run.starts));
  if (!run.stopped.empty() && run.stopped != "max_iters") parts.push_back("ended by: " + run.stopped);
  if (run.stopped.empty()) parts.push_back("killed, or still running");
  std::string text;
  for (auto const& part : parts) text += (text.empty() ? "" : " \u00b7 ") + shortened(part, 120);
  auto line = fmt::format("<p class=\"line\">{}</p>\n", escaped(text));
  std::string notes;
  if (run.earlier > 0)
    notes += fmt::format("The log also has {} other run{}, left out here. ", run.earlier, run.earlier == 1 ? "" : "s");
  if (run.unread > 0)
    notes += fmt::format("{} line{} of the log could not be read.", run.unread, run.unread == 1 ? "" : "s");
  if (!notes.empty()) line += fmt::format("<p class=\"line\">{}</p>\n", escaped(notes));
  return line;
}

std::string tiles(Material const& material) {
  auto const f = figures_of(material.run);
  std::string text;
  text += tile("validation loss", number_text(f.best_val, 4),
               fmt::format("best, at iteration {}", number_text(static_cast<double>(f.best_at))));
  text += tile("training loss", number_text(f.last_train, 4),
               fmt::format("at iteration {}", number_text(static_cast<double>(f.last_train_at))));
  text += tile("tokens per second", number_text(f.tokens_per_second),
               std::isfinite(f.milliseconds) ? number_text(f.milliseconds) + " ms an iteration" : std::string());
  text += tile("utilisation", percent(f.mfu), "of the ranks' peak");
  if (f.memory > 0)
    text += tile("memory", bytes_text(static_cast<double>(f.memory)),
                 material.run.starts > 1 ? "largest of the ranks and starts" : "largest of the ranks");
  if (auto const share = exposed_communication(material))
    text += tile("exposed communication", percent(*share), "of the traced steps' time");
  return text.empty() ? text : fmt::format("<dl class=\"tiles\">\n{}</dl>\n", text);
}

std::string run_table(std::vector<Material> const& materials) {
  std::string rows;
  for (std::size_t i = 0; i < materials.size(); ++i) {
    auto const& run = materials[i].run;
    auto const f = figures_of(run);
    auto const exposed = exposed_communication(materials[i]);
    rows += fmt::format(
        "<tr><th scope=\"row\"><span><span class=\"stroke\" style=\"background:var(--c{})\"></span>{}</span></th>",
        i % 6, escaped(shortened(run.name, 60)));
    rows += cell("best validation loss", number_text(f.best_val, 4));
    rows += cell("at iteration", number_text(static_cast<double>(f.best_at)));
    rows += cell("iterations", number_text(static_cast<double>(f.last)));
    rows += cell("tokens per second", number_text(f.tokens_per_second));
    rows += cell("utilisation", percent(f.mfu));
    rows += cell("memory a rank", f.memory > 0 ? bytes_text(static_cast<double>(f.memory)) : "-");
    rows += cell("exposed", exposed ? percent(*exposed) : "-") + "</tr>\n";
  }
  std::string_view const columns[] = {"best validation loss", "at iteration", "iterations",
                                      "tokens per second",    "utilisation",  "memory a rank",
                                      "exposed communication"};
  std::string names = "<th scope=\"col\">run</th>";
  for (auto const name : columns) names += fmt::format("<th scope=\"col\" class=\"number\">{}</th>", name);
  return fmt::format(
      "<section><table class=\"runs\"><thead><tr>{}</tr></thead><tbody>\n{}</tbody></table>\n"
      "<p class=\"say\">In the first chart thin lines are training losses, smoothed; lines with dots are "
      "validation losses.</p></section>\n",
      names, rows);
}

std::string settings_section(Run const& run) {
  auto const given = pairs(setting_rows(run, true)), others = pairs(setting_rows(run, false));
  if (given.empty() && others.empty()) return {};
  return fmt::format("<section>\n<h2>Settings</h2>\n<p class=\"say\">{}</p>\n{}{}</section>\n",
                     given.empty() ? "All are the defaults." : "Settings from config files and the command line.",
                     given, folded("all other settings, at their defaults", others));
}

std::string differences_section(std::vector<Run const*> const& runs) {
  std::string rows, own;
  for (auto const& [name, value] : runs[0]->header.settings) {
    bool const same = std::all_of(runs.begin(), runs.end(), [&name = name, &value = value](Run const* run) {
      return run->header.setting(name) == value;
    });
    if (same || name == "out_dir") continue;
    rows += fmt::format("<tr><th scope=\"row\">{}</th>", escaped(name));
    for (auto const* run : runs)
      rows += fmt::format("<td data-name=\"{}\">{}</td>", escaped(shortened(run->name, 60)),
                          escaped(shortened(run->header.setting(name), 400)));
    rows += "</tr>\n";
  }
  std::string names = "<th scope=\"col\">setting</th>";
  for (auto const* run : runs) {
    names += fmt::format("<th scope=\"col\">{}</th>", escaped(shortened(run->name, 60)));
    own += folded("all settings of " + shortened(run->name, 60),
                  pairs(setting_rows(*run, true) + setting_rows(*run, false)));
  }
  auto const table =
      rows.empty()
          ? std::string("<p class=\"say\">The runs have the same settings.</p>\n")
          : fmt::format("<table class=\"runs\"><thead><tr>{}</tr></thead><tbody>\n{}</tbody></table>\n", names, rows);
  return fmt::format("<section>\n<h2>Settings that differ</h2>\n{}{}</section>\n", table, own);
}

std::string environment_section(Run const& run, std::string const& of) {
  std::string rows;
  for (auto const& [name, value] : run.header.environment) rows += row(name, value);
  if (rows.empty()) return {};
  if (!of.empty()) return folded("environment" + of, pairs(rows));
  return fmt::format("<section>\n<h2>Environment</h2>\n{}</section>\n", pairs(rows));
}

}  // namespace transformer::report
