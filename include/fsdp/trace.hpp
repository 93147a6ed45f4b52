// SPDX-License-Identifier: Apache-2.0
// Traces of all ranks on one clock, in the format of Chrome and Perfetto; and a report of the overlap of
// communication with compute.
#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/communicator.hpp"
#include "fsdp/detail/trace/trace.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

namespace detail {

/// Reads a text of pack().
class Unpacker {
 public:
  explicit Unpacker(std::string_view text) : rest_(text) {}
  bool empty() const { return rest_.empty(); }
  std::int64_t number() {
    std::int64_t value = 0;
    auto const [end, error] = std::from_chars(rest_.data(), rest_.data() + rest_.size(), value);
    FSDP_EXPECTS(error == std::errc{} && end != rest_.data() + rest_.size(),
                 "the trace of another rank ends too early: it was not received whole");
    rest_.remove_prefix(static_cast<std::size_t>(end - rest_.data()) + 1);
    return value;
  }
  std::string words() {
    auto const size = static_cast<std::size_t>(number());
    FSDP_EXPECTS(size <= rest_.size(), "the trace of another rank ends too early: it was not received whole");
    std::string text(rest_.substr(0, size));
    rest_.remove_prefix(size);
    return text;
  }

 private:
  std::string_view rest_;
};

inline std::string pack(std::vector<TraceSpan> const& spans) {
  std::string text;
  for (auto const& s : spans)
    text += formatted("{} {} {} {} {} {} {}{} {}{} {}", static_cast<int>(s.kind), s.bytes, s.step, s.begin_ns, s.end_ns,
                      s.unit.size(), s.unit, s.what.size(), s.what, s.pass.size(), s.pass);
  return text;
}
/// @param shift  nanoseconds that are added to the times
inline std::vector<TraceSpan> unpack(std::string_view text, std::int64_t shift) {
  std::vector<TraceSpan> spans;
  for (Unpacker from(text); !from.empty();) {
    auto& s = spans.emplace_back();
    s.kind = static_cast<StreamKind>(from.number());
    s.bytes = from.number();
    s.step = from.number();
    s.begin_ns = from.number() + shift;
    s.end_ns = from.number() + shift;
    s.unit = from.words();
    s.what = from.words();
    s.pass = from.words();
  }
  return spans;
}

/// The offset to add to `other`'s clock for `first`'s, from times of both clocks before and after the same exchanges.
///
/// [Note: One clock] What a rank put into an exchange at its time s was taken out by another at its time e, which is
/// later: that bounds the difference of the two clocks from one side, and the way back from the other. Several rounds
/// narrow it down. Ranks of one machine share a clock, which the bounds then allow (ClockOffset).
inline std::int64_t clock_offset(std::string_view first, std::string_view other) {
  ClockOffset offset;
  Unpacker ours(first), theirs(other);
  while (!ours.empty()) {
    auto const first_before = ours.number(), first_after = ours.number();
    auto const before = theirs.number(), after = theirs.number();
    offset.at_most(first_after - before);
    offset.at_least(first_before - after);
  }
  return offset.value();
}

/// The offset of each rank's host clock to rank 0's; on rank 0 only. @note Collective: yes; blocks.
template <class C>
std::vector<std::int64_t> clock_offsets(C& world) {
  constexpr int rounds = 8;
  auto const ranks = static_cast<std::size_t>(world.size());
  std::string seen;
  for (int round = 0; round < rounds; ++round) {
    auto const before = steady_ns();
    static_cast<void>(comm::ask_first_rank(world, std::string{}, "clocks", comm::no_text));
    seen += formatted("{} {} ", before, steady_ns());
  }
  std::vector<std::int64_t> offsets(ranks, 0);
  static_cast<void>(comm::ask_first_rank(world, seen, "clocks", [&](std::vector<std::string> const& texts) {
    for (std::size_t rank = 1; rank < ranks; ++rank) offsets[rank] = clock_offset(texts[0], texts[rank]);
    return std::string();
  }));
  return offsets;
}

inline std::string json_text(std::string_view text) {
  std::string quoted = "\"";
  for (char const c : text) {
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      quoted += formatted("\\u{:04x}", static_cast<unsigned>(c));
    } else {
      quoted += c;
    }
  }
  return quoted + '"';
}
/// Nanoseconds as microseconds.
inline std::string json_us(std::int64_t ns) {
  auto const size = ns < 0 ? -ns : ns;
  return formatted("{}{}.{:03}", ns < 0 ? "-" : "", size / 1000, size % 1000);
}

}  // namespace detail

/// Gathers all ranks' spans, on rank 0's clock; on other ranks the result is empty.
/// @note Collective: yes; blocks the calling thread. The spans travel as text over the control plane.
template <class C>
std::vector<std::vector<TraceSpan>> gather_trace(C& world, std::vector<TraceSpan> const& mine) {
  auto const offsets = detail::clock_offsets(world);
  std::vector<std::vector<TraceSpan>> ranks;
  static_cast<void>(
      comm::ask_first_rank(world, detail::pack(mine), "trace", [&](std::vector<std::string> const& texts) {
        if (world.rank() != 0) return std::string();
        for (std::size_t rank = 0; rank < texts.size(); ++rank)
          ranks.push_back(detail::unpack(texts[rank], offsets[rank]));
        return std::string();
      }));
  return ranks;
}

/// Writes ranks' spans as a Chrome trace (https://ui.perfetto.dev and chrome://tracing open it): a process per rank, a
/// thread per stream, times from the first span on.
inline std::string chrome_trace(std::vector<std::vector<TraceSpan>> const& ranks) {
  auto origin = std::numeric_limits<std::int64_t>::max();
  for (auto const& spans : ranks)
    for (auto const& span : spans) origin = std::min(origin, span.begin_ns);
  std::string events;
  auto const add = [&](std::string const& event) { events += (events.empty() ? "\n" : ",\n") + event; };
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    add(formatted(R"({{"name":"process_name","ph":"M","pid":{},"args":{{"name":"rank {}"}}}})", rank, rank));
    add(formatted(R"({{"name":"process_sort_index","ph":"M","pid":{},"args":{{"sort_index":{}}}}})", rank, rank));
    std::array<bool, stream_names.size()> used{};
    for (auto const& span : ranks[rank]) used[static_cast<std::size_t>(span.kind)] = true;
    for (std::size_t kind = 0; kind < used.size(); ++kind) {
      if (!used[kind]) continue;
      add(formatted(R"({{"name":"thread_name","ph":"M","pid":{},"tid":{},"args":{{"name":"{}"}}}})", rank, kind,
                    stream_names[kind]));
      add(formatted(R"({{"name":"thread_sort_index","ph":"M","pid":{},"tid":{},"args":{{"sort_index":{}}}}})", rank,
                    kind, kind));
    }
    for (auto const& span : ranks[rank])
      add(formatted(
          R"({{"name":{},"cat":"{}","ph":"X","pid":{},"tid":{},"ts":{},"dur":{},"args":{{"unit":{},"pass":{},"step":{},"bytes":{}}}}})",
          detail::json_text(span.what + " " + span.unit),
          span.communicates() ? "communication"
          : span.computes()   ? "compute"
                              : "local",
          rank, static_cast<int>(span.kind), detail::json_us(span.begin_ns - origin),
          detail::json_us(span.end_ns - span.begin_ns), detail::json_text(span.unit), detail::json_text(span.pass),
          span.step, span.bytes));
  }
  return "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[" + events + "\n]}\n";
}

/// Times of a set of spans, in seconds.
struct OverlapTimes {
  double communication = 0.0;  ///< t_comm: at least one of the set's collectives runs
  double compute = 0.0;        ///< t_comp: the set computes
  double exposed = 0.0;        ///< compute waits for communication: the set communicates and no unit computes
  double slowdown = 0.0;       ///< t_comp a step against the reference's; 0: no reference

  /// t_overlapped: time of the set with overlap; exposed = t_overlapped - t_comp.
  double overlapped() const { return compute + exposed; }
  /// Fraction of `communication` that is exposed, from 0 to 1; 0 without communication.
  double exposed_share() const { return communication > 0.0 ? exposed / communication : 0.0; }
};

/// Overlap of one rank's spans. The inherited times are those of all spans.
struct OverlapReport : OverlapTimes {
  /// Times of one pass or of one unit.
  struct Row : OverlapTimes {
    std::string name;  ///< of the unit; or of the pass: "forward", "backward", "optimizer"
  };
  double wall = 0.0;  ///< of each step from its first begin to its last end; time shared by steps counts once
  /// The part of `exposed` after the last backward of a pass, when there is nothing left to compute: the reduction of
  /// the root (and the last bucket of NoShard).
  double final_reduction = 0.0;
  std::int64_t steps = 0;  ///< different values of TraceSpan::step

  std::vector<Row> passes;  ///< in order of appearance
  /// One row for each unit, in order of appearance. Time in which compute waits for two units counts for both, so the
  /// rows' sum may exceed the total.
  std::vector<Row> units;

  /// Time without compute and communication: the host is late, or prepares data, or a stream does local work.
  double idle() const { return wall - overlapped(); }
};

namespace detail {

using Interval = std::pair<std::int64_t, std::int64_t>;

/// Sorts and joins intervals.
inline std::vector<Interval> united(std::vector<Interval> intervals) {
  std::sort(intervals.begin(), intervals.end());
  std::vector<Interval> joined;
  for (auto const& interval : intervals) {
    if (!joined.empty() && interval.first <= joined.back().second) {
      joined.back().second = std::max(joined.back().second, interval.second);
    } else {
      joined.push_back(interval);
    }
  }
  return joined;
}
inline std::int64_t length(std::vector<Interval> const& joined) {
  std::int64_t sum = 0;
  for (auto const& interval : joined) sum += interval.second - interval.first;
  return sum;
}
/// The length of the time in `intervals` and not in `joined`.
inline std::int64_t length_outside(std::vector<Interval> const& joined, std::vector<Interval> intervals) {
  intervals.insert(intervals.end(), joined.begin(), joined.end());
  return length(united(std::move(intervals))) - length(joined);
}

inline double seconds(std::int64_t ns) { return static_cast<double>(ns) * 1e-9; }

/// For each span, in the order of enqueueing: whether it reduces gradients, and no backward compute follows it in its
/// pass.
inline std::vector<bool> final_reductions(std::vector<TraceSpan> const& spans) {
  std::vector<bool> found(spans.size(), false);
  std::vector<std::size_t> pending;
  auto const confirm = [&] {
    for (auto const i : pending) found[i] = true;
    pending.clear();
  };
  for (std::size_t i = 0; i < spans.size(); ++i) {
    auto const& span = spans[i];
    if (span.pass != "backward") {
      confirm();
    } else if (span.kind == StreamKind::compute) {
      pending.clear();
    } else if (span.kind != StreamKind::gather) {
      pending.push_back(i);
    }
  }
  confirm();
  return found;
}

/// Intervals of a set of spans.
struct Intervals {
  std::vector<Interval> compute, communication;
  void add(TraceSpan const& span) {
    if (span.communicates()) communication.emplace_back(span.begin_ns, span.end_ns);
    if (span.computes()) compute.emplace_back(span.begin_ns, span.end_ns);
  }
  /// @param all_compute  joined
  void times(OverlapTimes& to, std::vector<Interval> const& all_compute) const {
    to.communication = seconds(length(united(communication)));
    to.compute = seconds(length(united(compute)));
    to.exposed = seconds(length_outside(all_compute, communication));
  }
};

template <class Key>
std::vector<OverlapReport::Row> overlap_rows(std::vector<TraceSpan> const& spans,
                                             std::vector<Interval> const& all_compute, Key const& key) {
  std::vector<OverlapReport::Row> rows;
  std::vector<Intervals> intervals;
  for (auto const& span : spans) {
    std::size_t at = 0;
    while (at < rows.size() && rows[at].name != key(span)) ++at;
    if (at == rows.size()) {
      rows.emplace_back().name = key(span);
      intervals.emplace_back();
    }
    intervals[at].add(span);
  }
  for (std::size_t i = 0; i < rows.size(); ++i) intervals[i].times(rows[i], all_compute);
  return rows;
}

}  // namespace detail

/// Computes exposed communication, the time in which compute waits for communication, from unions of intervals: in
/// total, by pass and by unit.
/// @param spans      one rank's, in the order in which they were enqueued
/// @param reference  a run of the same units without communication beside compute; nullptr: no slowdown is reported
inline OverlapReport overlap_report(std::vector<TraceSpan> const& spans, OverlapReport const* reference = nullptr) {
  OverlapReport report;
  if (spans.empty()) return report;
  detail::Intervals all;
  std::vector<detail::Interval> others;  // communication but the final reductions
  std::map<std::int64_t, detail::Interval> steps;
  auto const last = detail::final_reductions(spans);
  for (std::size_t i = 0; i < spans.size(); ++i) {
    all.add(spans[i]);
    if (spans[i].communicates() && !last[i]) others.emplace_back(spans[i].begin_ns, spans[i].end_ns);
    auto& step = steps.try_emplace(spans[i].step, spans[i].begin_ns, spans[i].end_ns).first->second;
    step = {std::min(step.first, spans[i].begin_ns), std::max(step.second, spans[i].end_ns)};
  }
  auto const compute = detail::united(all.compute);
  all.times(report, compute);
  std::vector<detail::Interval> hulls;
  for (auto const& step : steps) hulls.push_back(step.second);
  report.wall = detail::seconds(detail::length(detail::united(std::move(hulls))));
  report.final_reduction = report.exposed - detail::seconds(detail::length_outside(compute, std::move(others)));
  report.steps = static_cast<std::int64_t>(steps.size());
  report.passes = detail::overlap_rows(spans, compute, [](TraceSpan const& span) { return span.pass; });
  report.units = detail::overlap_rows(spans, compute, [](TraceSpan const& span) { return span.unit; });
  if (reference == nullptr) return report;

  auto const compare = [&](OverlapTimes& mine, OverlapTimes const& theirs) {
    if (theirs.compute > 0.0)
      mine.slowdown =
          mine.compute / static_cast<double>(report.steps) / (theirs.compute / static_cast<double>(reference->steps));
  };
  compare(report, *reference);
  auto const compare_rows = [&](std::vector<OverlapReport::Row>& mine, std::vector<OverlapReport::Row> const& theirs) {
    for (auto& row : mine)
      for (auto const& other : theirs)
        if (other.name == row.name) compare(row, other);
  };
  compare_rows(report.passes, reference->passes);
  compare_rows(report.units, reference->units);
  return report;
}

/// Formats the report as a line, in milliseconds per step.
inline std::string summary(OverlapReport const& report) {
  double const scale = 1e3 / static_cast<double>(std::max<std::int64_t>(report.steps, 1));
  auto const rest = report.exposed - report.final_reduction;
  return formatted(
      "{} step{} of {:.3f} ms: t_comm {:.3f}, t_comp {:.3f}, idle {:.3f}; exposed {:.3f} ms ({:.1f} %): {:.3f} ms "
      "after the last backward (unavoidable), {:.3f} ms elsewhere",
      report.steps, report.steps == 1 ? "" : "s", report.wall * scale, report.communication * scale,
      report.compute * scale, report.idle() * scale, report.exposed * scale, report.exposed_share() * 100.0,
      report.final_reduction * scale, rest * scale);
}

/// Formats the report as a table, in milliseconds per step.
inline std::string text(OverlapReport const& report) {
  std::size_t widest = 9;
  for (auto const& row : report.units) widest = std::max(widest, row.name.size());
  double const scale = 1e3 / static_cast<double>(std::max<std::int64_t>(report.steps, 1));
  auto const line = [&](std::string_view label, OverlapTimes const& times) {
    return formatted("{:<{}} {:>10.3f} {:>10.3f} {:>12.3f} {:>10.3f} {:>9.1f} {:>9}\n", label, widest,
                     times.communication * scale, times.compute * scale, times.overlapped() * scale,
                     times.exposed * scale, times.exposed_share() * 100.0,
                     times.slowdown > 0.0 ? formatted("{:.3f}", times.slowdown) : "-");
  };
  auto table = formatted("{:<{}} {:>10} {:>10} {:>12} {:>10} {:>9} {:>9}\n", "ms a step", widest, "t_comm", "t_comp",
                         "t_overlapped", "exposed", "exposed %", "slowdown");
  for (auto const& row : report.units) table += line(row.name, row);
  for (auto const& row : report.passes) table += line(row.name, row);
  table += line("total", report);
  return table + summary(report) + '\n';
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
