// SPDX-License-Identifier: Apache-2.0
#include "transformer/report/notes.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "transformer/report/escape.hpp"
#include "transformer/report/scale.hpp"

namespace transformer::report {
namespace {

constexpr std::size_t most_jumps = 8, most_samples = 20, most_characters = 4000;

std::string iteration_text(std::int64_t iteration) { return number_text(static_cast<double>(iteration)); }

std::string jumps_text(Run const& run) {
  std::string text;
  auto const shown = std::min(run.jumps.size(), most_jumps);
  for (std::size_t i = 0; i < shown; ++i) {
    auto const& jump = run.jumps[i];
    text += fmt::format("{}{} {} at iteration {} (median before it {})", i == 0 ? "" : ", ",
                        jump.what == "loss" ? "loss" : "gradient norm", number_text(jump.value),
                        iteration_text(jump.iteration), number_text(jump.median));
  }
  if (run.jumps.size() > shown) text += fmt::format(", and {} more", run.jumps.size() - shown);
  return text;
}

std::string sample(Sample const& written) {
  return fmt::format("<pre class=\"sample\" tabindex=\"0\">{}</pre>\n",
                     escaped(shortened(written.text, most_characters)));
}

}  // namespace

std::string null_losses(Run const& run) {
  std::size_t none = 0;
  std::int64_t first = -1;
  for (auto const& row : run.iterations) {
    if (is_drawn(row.loss)) continue;
    ++none;
    if (first < 0) first = row.iteration;
  }
  std::size_t evaluations = 0;
  for (auto const& row : run.evaluations)
    if (!is_drawn(row.train_loss) || !is_drawn(row.val_loss)) ++evaluations;
  std::string text;
  if (none > 0)
    text = fmt::format("{} of {} training losses are null (not a finite number), from iteration {} on.",
                       none == run.iterations.size() ? "All" : fmt::format("{}", none), run.iterations.size(), first);
  if (evaluations > 0)
    text += fmt::format("{}{} of {} evaluations have a loss that is null.", text.empty() ? "" : " ",
                        evaluations == run.evaluations.size() ? "All" : fmt::format("{}", evaluations),
                        run.evaluations.size());
  return text.empty() ? text : text + " The training has diverged.";
}

std::string notes_section(Run const& run, std::string const& of) {
  std::string text;
  if (auto const null = null_losses(run); !null.empty())
    text += fmt::format("<p class=\"say warn\">{}{}</p>\n", escaped(of), escaped(null));
  if (!run.jumps.empty())
    text += fmt::format("<p class=\"say\">{}Jumps, as circles in the charts: {}.</p>\n", escaped(of),
                        escaped(jumps_text(run)));
  return text.empty() ? text : fmt::format("<div class=\"notes\">{}</div>\n", text);
}

std::string samples_section(Run const& run, std::string const& of) {
  if (run.samples.empty()) return {};
  auto const& last = run.samples.back();
  auto text =
      fmt::format("<section>\n<h2>Samples{}</h2>\n<p class=\"say\">Written by the model before iteration {}.</p>\n{}",
                  escaped(of), iteration_text(last.iteration), sample(last));
  std::string earlier;
  auto const shown = std::min(run.samples.size() - 1, most_samples);
  for (std::size_t i = 0; i < shown; ++i) {
    auto const& written = run.samples[run.samples.size() - 2 - i];
    earlier += fmt::format("<p class=\"say\">Before iteration {}.</p>\n{}", iteration_text(written.iteration),
                           sample(written));
  }
  if (!earlier.empty())
    text += fmt::format("<details><summary>the {} before it</summary>\n{}</details>\n", shown, earlier);
  return text + "</section>\n";
}

}  // namespace transformer::report
