// SPDX-License-Identifier: Apache-2.0
// What ran when, on which stream; how much of the communication was hidden; Chrome/Perfetto JSON.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/concepts.hpp"
#include "fsdp/error.hpp"
#include "fsdp/memory.hpp"

namespace fsdp {

enum class StreamKind : unsigned char { compute, gather, reduce, replicate, count_ };

inline constexpr std::array<std::string_view, static_cast<std::size_t>(StreamKind::count_)> stream_names{
    "compute", "gather", "reduce", "replicate"};
constexpr std::string_view name(StreamKind kind) { return stream_names[static_cast<std::size_t>(kind)]; }

/// One piece of work on one stream. The texts are the unit's name and a literal.
struct TraceSpan {
  std::string_view unit;
  std::string_view what;  ///< "forward", "backward", "all-gather", "reduce", "optimizer"
  StreamKind kind{};
  std::int64_t begin_ns = 0;  ///< host: the monotonic clock, comparable over processes; CUDA: the device's global timer
  std::int64_t end_ns = 0;
};

namespace detail {
/// Writes the time at which the stream arrives here.
struct Stamp {
  template <class Block>
  FSDP_HD void operator()(Block const& block, std::int64_t, std::int64_t* out) const {
    if (block.thread() != 0) return;
#if defined(__CUDA_ARCH__)
    unsigned long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    *out = static_cast<std::int64_t>(now);
#else
    *out = std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
               .count();
#endif
  }
};
}  // namespace detail

/// Collects spans of one rank: two stamps a span, in device memory taken once. Spans beyond the capacity are counted,
/// not kept.
template <Device D>
class Tracer {
 public:
  using Stream = typename D::Stream;
  static constexpr std::size_t none = static_cast<std::size_t>(-1);

  /// @param capacity  spans
  Tracer(D const& device, MemoryAccount& account, std::size_t capacity)
      : device_(device),
        stamps_(device_, account, MemoryTag::scalars, capacity * 2 * sizeof(std::int64_t)),
        capacity_(capacity) {
    spans_.reserve(capacity);
  }
  Tracer(Tracer&&) = delete;

  /// @return what end() takes
  std::size_t begin(Stream& stream, StreamKind kind, std::string_view unit, std::string_view what) {
    if (spans_.size() == capacity_) {
      ++lost_;
      return none;
    }
    spans_.push_back({unit, what, kind, 0, 0});
    device_.launch(stream, std::int64_t{1}, detail::Stamp{}, stamp(spans_.size() - 1));
    return spans_.size() - 1;
  }
  void end(Stream& stream, std::size_t span) {
    if (span != none) device_.launch(stream, std::int64_t{1}, detail::Stamp{}, stamp(span) + 1);
  }

  std::size_t lost() const { return lost_; }

  /// The spans so far, in the order in which the host enqueued them; starts anew.
  /// @pre all streams that carry spans have been synchronised
  std::vector<TraceSpan> collect(Stream& stream) {
    std::vector<std::int64_t> times(spans_.size() * 2);
    device_.copy_async(stream, times.data(), stamps_.data(), times.size() * sizeof(std::int64_t));
    device_.synchronize(stream);
    for (std::size_t i = 0; i < spans_.size(); ++i)
      spans_[i].begin_ns = times[2 * i], spans_[i].end_ns = times[2 * i + 1];
    lost_ = 0;
    auto collected = std::move(spans_);
    spans_ = {};
    spans_.reserve(capacity_);
    return collected;
  }

 private:
  std::int64_t* stamp(std::size_t span) { return stamps_.template as<std::int64_t>() + 2 * span; }

  D device_;
  AccountedMemory<D> stamps_;
  std::size_t capacity_;
  std::size_t lost_ = 0;
  std::vector<TraceSpan> spans_;
};

/// Seconds of one rank's spans.
struct OverlapReport {
  double wall = 0.0;           ///< first begin to last end
  double compute = 0.0;        ///< compute runs
  double communication = 0.0;  ///< at least one communication stream runs
  double exposed = 0.0;        ///< communication runs and compute does not
  double exposed_share() const { return communication > 0.0 ? exposed / communication : 0.0; }
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
}  // namespace detail

/// Communication that compute does not hide, from the union of intervals of each kind.
inline OverlapReport overlap_report(std::vector<TraceSpan> const& spans) {
  std::vector<detail::Interval> compute, communication, all;
  for (auto const& span : spans) {
    (span.kind == StreamKind::compute ? compute : communication).emplace_back(span.begin_ns, span.end_ns);
    all.emplace_back(span.begin_ns, span.end_ns);
  }
  if (all.empty()) return {};
  compute = detail::united(std::move(compute));
  communication = detail::united(std::move(communication));
  all = detail::united(std::move(all));
  auto const seconds = [](std::int64_t ns) { return static_cast<double>(ns) * 1e-9; };
  OverlapReport report;
  report.wall = seconds(all.back().second - all.front().first);
  report.compute = seconds(detail::length(compute));
  report.communication = seconds(detail::length(communication));
  report.exposed = seconds(detail::length(all) - detail::length(compute));
  return report;
}

/// Spans as Chrome trace events (https://ui.perfetto.dev opens them), a process per rank, a thread per stream.
/// @return the events alone, comma-separated: ranks' texts are joined inside {"traceEvents":[...]}
inline std::string chrome_events(std::vector<TraceSpan> const& spans, int rank) {
  std::string events =
      fmt::format(R"({{"name":"process_name","ph":"M","pid":{0},"args":{{"name":"rank {0}"}}}})", rank);
  for (std::size_t kind = 0; kind < stream_names.size(); ++kind)
    events += fmt::format(
        ",\n"
        R"({{"name":"thread_name","ph":"M","pid":{},"tid":{},"args":{{"name":"{}"}}}})",
        rank, kind, stream_names[kind]);
  for (auto const& span : spans)
    events += fmt::format(
        ",\n"
        R"({{"name":"{} {}","ph":"X","pid":{},"tid":{},"ts":{:.3f},"dur":{:.3f}}})",
        span.what, span.unit, rank, static_cast<int>(span.kind), static_cast<double>(span.begin_ns) * 1e-3,
        static_cast<double>(span.end_ns - span.begin_ns) * 1e-3);
  return events;
}

}  // namespace fsdp
