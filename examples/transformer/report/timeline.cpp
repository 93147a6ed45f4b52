// SPDX-License-Identifier: Apache-2.0
#include "transformer/report/timeline.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include "transformer/report/scale.hpp"
#include "transformer/report/svg.hpp"

namespace transformer::report {
namespace {

using fsdp::StreamKind;
using fsdp::TraceSpan;
using fsdp::detail::Interval;

constexpr double first_lane = 68, lane = 18, lane_pitch = 21, rank_gap = 10, rank_head = 18;

double milliseconds(std::int64_t ns) { return static_cast<double>(ns) * 1e-6; }

/// The parts of the joined intervals `from` that lie outside the joined intervals `taken`.
std::vector<Interval> outside(std::vector<Interval> const& from, std::vector<Interval> const& taken) {
  std::vector<Interval> rest;
  std::size_t at = 0;
  for (auto [begin, end] : from) {
    while (at < taken.size() && taken[at].second <= begin) ++at;
    for (auto next = at; next < taken.size() && taken[next].first < end; ++next) {
      if (taken[next].first > begin) rest.emplace_back(begin, taken[next].first);
      begin = std::max(begin, taken[next].second);
    }
    if (begin < end) rest.emplace_back(begin, end);
  }
  return rest;
}

std::vector<Interval> intervals(std::vector<TraceSpan> const& spans, bool (TraceSpan::*which)() const) {
  std::vector<Interval> found;
  for (auto const& span : spans)
    if ((span.*which)()) found.emplace_back(span.begin_ns, span.end_ns);
  return fsdp::detail::united(std::move(found));
}

/// Rectangles of one look on a lane. Those that are narrower than half a pixel, and hardly that far apart, become one
/// of a few pixels, as pale as there is room between them: a lane has no more of them than pixels, however long the
/// trace.
class Boxes {
 public:
  /// @param inside_css  the class of what is written on them
  Boxes(std::string css, double y, std::string inside_css = "inside on")
      : css_(std::move(css)), inside_css_(std::move(inside_css)), y_(y) {}
  void add(double begin, double end, std::string title, std::string inside = {}) {
    bool const tiny = end - begin < 0.5 || end_ - begin_ < 0.5;
    if (joined_ > 0 && tiny && begin - end_ < 0.5 && end - begin_ < 3) {
      end_ = std::max(end_, end);
      covered_ += end - begin;
      ++joined_;
      return;
    }
    flush();
    begin_ = begin;
    end_ = end;
    covered_ = end - begin;
    title_ = std::move(title);
    inside_ = std::move(inside);
    joined_ = 1;
  }
  std::string finished() {
    flush();
    return std::move(text_);
  }

 private:
  void flush() {
    if (joined_ == 0) return;
    double const width = std::max(end_ - begin_, 0.5);
    auto const title = joined_ > 1 ? fmt::format("{} and {} more", title_, joined_ - 1) : title_;
    double const share = covered_ / width;
    auto const pale = joined_ > 1 && share < 0.9;
    if (pale) text_ += fmt::format("<g opacity=\"{:.2f}\">", std::max(share, 0.15));
    text_ += rect(css_, begin_, y_, width > 3 ? width - 0.6 : width, lane, title);
    if (pale) text_ += "</g>\n";
    if (joined_ == 1 && !inside_.empty() && text_width(inside_) + 6 < width)
      text_ += text_at(inside_css_, begin_ + 4, y_ + lane / 2 + 4, inside_);
  }
  std::string css_, inside_css_, text_, title_, inside_;
  double y_, begin_ = 0, end_ = 0;
  double covered_ = 0;      ///< pixels
  std::size_t joined_ = 0;  ///< spans in the box that is not yet written; 0: there is none
};

/// Sorted by begin.
std::vector<TraceSpan const*> lane_of(std::vector<TraceSpan> const& spans, StreamKind kind) {
  std::vector<TraceSpan const*> found;
  for (auto const& span : spans)
    if (span.kind == kind) found.push_back(&span);
  std::stable_sort(found.begin(), found.end(), [](auto const* a, auto const* b) { return a->begin_ns < b->begin_ns; });
  return found;
}

std::string title_of(TraceSpan const& span) {
  return fmt::format("{} {}: {} ms", span.what, span.unit, number_text(milliseconds(span.end_ns - span.begin_ns)));
}

/// The last two parts of a unit's name: "h.3" of "transformer.h.3".
std::string short_name(std::string const& unit) {
  auto const last = unit.rfind('.');
  if (last == std::string::npos || last == 0) return unit;
  auto const before = unit.rfind('.', last - 1);
  return before == std::string::npos ? unit : unit.substr(before + 1);
}

/// One rank's lanes.
class RankLanes {
 public:
  RankLanes(std::vector<TraceSpan> const& spans, Scale const& x)
      : spans_(spans),
        x_(x),
        compute_(intervals(spans, &TraceSpan::computes)),
        moved_(intervals(spans, &TraceSpan::communicates)),
        exposed_(outside(moved_, compute_)) {}

  std::string compute(double y) const {
    std::string text;
    Boxes gaps("gap", y);
    for (auto const& [begin, end] : exposed_) gaps.add(x_at(begin), x_at(end), "waits for communication");
    text += gaps.finished();
    for (std::string_view const pass : {"forward", "backward", "optimizer", ""}) {
      Boxes boxes(pass.empty() ? "compute" : fmt::format("compute {}", pass), y,
                  pass == "forward" ? "inside on" : "inside over");
      for (auto const* span : lane_of(spans_, StreamKind::compute)) {
        bool const named = span->pass == "forward" || span->pass == "backward" || span->pass == "optimizer";
        if (span->communicates() || (named ? span->pass != pass : !pass.empty())) continue;
        boxes.add(x_at(span->begin_ns), x_at(span->end_ns), title_of(*span), short_name(span->unit));
      }
      text += boxes.finished();
    }
    return text + communication(StreamKind::compute, y);
  }

  std::string communication(StreamKind kind, double y) const {
    Boxes local("local", y), hidden("moved", y), exposed("exposed", y, "inside over");
    for (auto const* span : lane_of(spans_, kind)) {
      if (kind == StreamKind::compute && !span->communicates()) continue;
      auto const title = title_of(*span);
      auto const show = [&](Boxes& boxes, Interval const& part) {
        boxes.add(x_at(part.first), x_at(part.second), title, short_name(span->unit));
      };
      Interval const whole{span->begin_ns, span->end_ns};
      if (!span->communicates()) {
        show(local, whole);
        continue;
      }
      auto const bare = outside({whole}, compute_);
      for (auto const& part : outside({whole}, bare)) show(hidden, part);
      for (auto const& part : bare) show(exposed, part);
    }
    return local.finished() + hidden.finished() + exposed.finished();
  }

 private:
  double x_at(std::int64_t ns) const { return x_(static_cast<double>(ns)); }

  std::vector<TraceSpan> const& spans_;
  Scale x_;
  std::vector<Interval> compute_, moved_, exposed_;
};

std::string time_axis(Scale const& x, std::int64_t begin_ns, double y, double width) {
  double const length = milliseconds(static_cast<std::int64_t>(x.range().high) - begin_ns);
  std::string text = line("axis", first_lane, y, width - 12, y);
  for (auto const& tick :
       ticks({0, length, false}, false, static_cast<std::size_t>(std::max(3.0, (width - first_lane) / 110)))) {
    double const at = x(static_cast<double>(begin_ns) + tick.value * 1e6);
    text += line("axis", at, y, at, y + 4);
    auto const label = tick.text + " ms";
    bool const at_edge = at + text_width(label) / 2 > width - 2;
    text += text_at("tick", at_edge ? width - 2 : at, y + 18, label, at_edge ? "end" : "middle");
  }
  return text;
}

}  // namespace

TracedStep typical_step(Trace const& trace) {
  struct Step {
    std::size_t ranks = 0;  ///< that have spans of it
    Interval hull{std::numeric_limits<std::int64_t>::max(), 0};
    std::int64_t length() const { return hull.second - hull.first; }
  };
  std::map<std::int64_t, Step> steps;
  std::size_t present = 0;  // ranks that have spans at all
  for (auto const& spans : trace.ranks) {
    std::set<std::int64_t> mine;
    for (auto const& span : spans) {
      auto& [ranks, hull] = steps[span.step];
      hull = {std::min(hull.first, span.begin_ns), std::max(hull.second, span.end_ns)};
      if (mine.insert(span.step).second) ++ranks;
    }
    if (!spans.empty()) ++present;
  }
  std::vector<std::pair<std::int64_t, Step>> candidates;
  for (auto const& entry : steps)
    if (entry.second.ranks == present) candidates.push_back(entry);
  if (candidates.empty()) candidates.assign(steps.begin(), steps.end());
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](auto const& a, auto const& b) { return a.second.length() < b.second.length(); });
  auto const& [number, step] = candidates[(candidates.size() - 1) / 2];
  TracedStep found{number, step.hull.first, step.hull.second, {}};
  for (auto const& spans : trace.ranks) {
    auto& mine = found.ranks.emplace_back();
    for (auto const& span : spans)
      if (span.step == number) mine.push_back(span);
  }
  return found;
}

std::vector<fsdp::OverlapReport> overlap_of(Trace const& trace) {
  std::vector<fsdp::OverlapReport> reports;
  for (auto const& spans : trace.ranks) reports.push_back(fsdp::overlap_report(spans));
  return reports;
}

Drawn timeline_drawing(TracedStep const& step, double width) {
  auto const end_ns = std::max(step.end_ns, step.begin_ns + 1);
  Scale const x({static_cast<double>(step.begin_ns), static_cast<double>(end_ns), false}, first_lane, width - 12);
  constexpr std::array kinds{StreamKind::gather, StreamKind::reduce, StreamKind::replicate};
  std::string text;
  double y = 0;
  for (std::size_t rank = 0; rank < std::min(step.ranks.size(), most_ranks_drawn); ++rank) {
    auto const& spans = step.ranks[rank];
    RankLanes const lanes(spans, x);
    text += text_at("lane strong", 0, y + 12, fmt::format("rank {}", rank));
    y += rank_head;
    text += text_at("lane", first_lane - 8, y + lane / 2 + 4, "compute", "end") + lanes.compute(y);
    for (auto const kind : kinds) {
      if (std::none_of(spans.begin(), spans.end(), [&](TraceSpan const& span) { return span.kind == kind; })) continue;
      y += lane_pitch;
      text += text_at("lane", first_lane - 8, y + lane / 2 + 4, fsdp::name(kind), "end") + lanes.communication(kind, y);
    }
    y += lane_pitch + rank_gap;
  }
  text += time_axis(x, step.begin_ns, y - rank_gap + 2, width);
  return {text, y - rank_gap + 26};
}

std::string timeline_svg(TracedStep const& step, double width) {
  auto const drawn = timeline_drawing(step, width);
  return svg_element(width, drawn.height, fmt::format("Timeline of iteration {}", step.step), "", drawn.content);
}

}  // namespace transformer::report
