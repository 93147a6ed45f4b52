// SPDX-License-Identifier: Apache-2.0
#include "transformer/report/curves.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "transformer/report/escape.hpp"

namespace transformer::report {
namespace {

template <class Value>
Points points_of(Run const& run, Value value) {
  Points points;
  for (auto const& row : run.iterations)
    points.push_back({static_cast<double>(row.iteration), row.*value, row.tokens, row.seconds});
  return points;
}

template <class Value>
Points evaluations_of(Run const& run, Value value) {
  Points points;
  for (auto const& row : run.evaluations)
    points.push_back({static_cast<double>(row.iteration), row.*value, row.tokens, row.seconds});
  return points;
}

/// The points of a curve at which training has found a jump.
Points jumps_of(Run const& run, std::string_view what, Points const& points) {
  Points found;
  for (auto const& jump : run.jumps) {
    if (jump.what != what) continue;
    auto const x = static_cast<double>(jump.iteration);
    auto const at = std::lower_bound(points.begin(), points.end(), x,
                                     [](Point const& point, double wanted) { return point.x < wanted; });
    if (at != points.end() && at->x == x) found.push_back(*at);
  }
  return found;
}

/// Draws the mean of about a fiftieth of the run; a pointer goes on to read what was logged.
void smooth(Curve& curve) {
  auto const half = curve.points.size() / 100;
  if (half == 0) return;
  curve.logged = std::move(curve.points);
  curve.points = smoothed(curve.logged, half);
}

std::string name_of(Run const& run) { return shortened(run.name, 24); }

/// One curve a run, without names at their ends where there are several: the page has a legend.
template <class Value>
Chart simple_chart(std::vector<Run const*> const& runs, std::string title, std::string unit, std::string name,
                   Value value) {
  Chart chart;
  chart.title = std::move(title);
  chart.unit = std::move(unit);
  chart.from_zero = true;
  chart.labels = false;
  for (std::size_t i = 0; i < runs.size(); ++i)
    chart.curves.push_back({runs.size() == 1 ? name : name_of(*runs[i]), colour_of(i), points_of(*runs[i], value)});
  return chart;
}

/// A single curve keeps what was logged behind its mean.
void smooth_all(Chart& chart) {
  auto raw = chart.curves[0];
  raw.css += " raw";
  raw.read = false;
  raw.jumps.clear();
  for (auto& curve : chart.curves) smooth(curve);
  if (chart.curves.size() == 1) chart.curves.insert(chart.curves.begin(), raw);
}

}  // namespace

std::string colour_of(std::size_t run) { return fmt::format("c{}{}", run % 6, run % 12 < 6 ? "" : " dashed"); }

Chart loss_chart(std::vector<Run const*> const& runs) {
  Chart chart;
  chart.title = "Loss";
  chart.unit = "nats per token";
  chart.may_be_logarithmic = true;
  bool const single = runs.size() == 1;
  chart.labels = single;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    auto const& run = *runs[i];
    auto const losses = points_of(run, &Iteration::loss);
    auto const colour = colour_of(i);
    if (single) chart.curves.push_back({"each iteration", colour + " raw", losses, false});
    chart.curves.push_back({single ? "train" : name_of(run) + " train", single ? colour : colour + " thin", losses});
    smooth(chart.curves.back());
    chart.curves.back().jumps = jumps_of(run, "loss", losses);
    auto const val = evaluations_of(run, &Evaluation::val_loss);
    chart.curves.push_back({single ? "val" : name_of(run) + " val", single ? colour_of(1) : colour, val, true, true});
  }
  return chart;
}

Chart learning_rate_chart(std::vector<Run const*> const& runs) {
  return simple_chart(runs, "Learning rate", "", "learning rate", &Iteration::learning_rate);
}

Chart norm_chart(std::vector<Run const*> const& runs) {
  auto chart = simple_chart(runs, "Gradient norm", "before clipping", "norm", &Iteration::gradient_norm);
  if (auto const limit = runs[0]->header.setting("grad_clip"); runs.size() == 1 && !limit.empty())
    chart.unit += " to " + shortened(limit, 12);
  for (std::size_t i = 0; i < runs.size(); ++i)
    chart.curves[i].jumps = jumps_of(*runs[i], "grad_norm", chart.curves[i].points);
  smooth_all(chart);
  return chart;
}

Chart speed_chart(std::vector<Run const*> const& runs) {
  auto chart = simple_chart(runs, "Speed", "tokens per second", "tokens/s", &Iteration::tokens_per_second);
  smooth_all(chart);
  return chart;
}

Figures figures_of(Run const& run) {
  Figures figures;
  for (auto const& row : run.evaluations) {
    if (!is_drawn(row.val_loss) || row.val_loss >= figures.best_val) continue;
    figures.best_val = row.val_loss;
    figures.best_at = row.iteration;
  }
  std::vector<double> speeds, times, shares;
  for (auto const& row : run.iterations) {
    speeds.push_back(row.tokens_per_second);
    times.push_back(row.milliseconds);
    shares.push_back(row.mfu);
    figures.last = row.iteration;
    if (is_drawn(row.loss)) figures.last_train = row.loss, figures.last_train_at = row.iteration;
  }
  if (!run.evaluations.empty()) figures.last = std::max(figures.last, run.evaluations.back().iteration);
  figures.tokens_per_second = median(speeds);
  figures.milliseconds = median(times);
  figures.mfu = median(shares);
  figures.memory = run.most_memory;
  return figures;
}

}  // namespace transformer::report
