// SPDX-License-Identifier: Apache-2.0
// Collects the spans of all ranks on one clock, and writes them as a Chrome/Perfetto trace.
#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/consult.hpp"
#include "fsdp/trace/trace.hpp"

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
    static_cast<void>(comm::consult(world, std::string{}, "clocks", comm::no_text));
    seen += formatted("{} {} ", before, steady_ns());
  }
  std::vector<std::int64_t> offsets(ranks, 0);
  static_cast<void>(comm::consult(world, seen, "clocks", [&](std::vector<std::string> const& texts) {
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
  static_cast<void>(comm::consult(world, detail::pack(mine), "trace", [&](std::vector<std::string> const& texts) {
    if (world.rank() != 0) return std::string();
    for (std::size_t rank = 0; rank < texts.size(); ++rank) ranks.push_back(detail::unpack(texts[rank], offsets[rank]));
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

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
