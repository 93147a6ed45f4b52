// SPDX-License-Identifier: Apache-2.0
#include "transformer/report/trace_reader.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <string_view>
#include <system_error>
#include <utility>

#include "transformer/report/json_members.hpp"

namespace transformer::report {
namespace {

constexpr auto streams = static_cast<std::size_t>(fsdp::StreamKind::count_);

/// Microseconds in nanoseconds. @pre 0 <= us < 1e15
std::int64_t nanoseconds(double us) { return std::llround(us * 1e3); }

/// Ends the parser's work: there are as many spans as were asked for.
struct Enough {};

/// Takes events one by one, so that no more than one of them is held as JSON.
class Events {
 public:
  explicit Events(TraceLimits limits) : limits_(limits) {}

  /// Reads the header, which stands before the events.
  void take_header(Json const& object) { trace_.run_id = text(object, "run"); }
  void take(Json const& event) {
    if (text(event, "ph") != "X") return;
    auto const args = event.find("args");
    double const rank = number(event, "pid", -1), stream = number(event, "tid", -1);
    double const begin = number(event, "ts", -1), length = number(event, "dur", -1);
    constexpr double most = 1e12;  // microseconds: eleven days
    bool const ours = args != event.end() && args->is_object() && rank >= 0 && stream >= 0 &&
                      stream < static_cast<double>(streams) && begin >= 0 && begin < most && length >= 0 &&
                      length < most;
    if (!ours) return;
    bool const full = trace_.spans == limits_.spans;
    bool const beyond = rank >= static_cast<double>(limits_.ranks);
    if (full || beyond) trace_.cut = true;
    if (full) throw Enough{};
    if (beyond) return;
    add(event, *args, static_cast<std::size_t>(rank), static_cast<fsdp::StreamKind>(static_cast<int>(stream)),
        nanoseconds(begin), nanoseconds(length));
  }
  Trace finished() { return std::move(trace_); }

 private:
  void add(Json const& event, Json const& args, std::size_t rank, fsdp::StreamKind kind, std::int64_t begin,
           std::int64_t length) {
    if (trace_.ranks.size() <= rank) trace_.ranks.resize(rank + 1);
    auto& span = trace_.ranks[rank].emplace_back();
    span.unit = text(args, "unit");
    span.pass = text(args, "pass");
    span.what = text(event, "name");  // "what unit"
    if (auto const tail = " " + span.unit; span.what.ends_with(tail)) span.what.resize(span.what.size() - tail.size());
    span.kind = kind;
    span.step = static_cast<std::int64_t>(std::min(number(args, "step", -1), 1e15));
    span.begin_ns = begin;
    span.end_ns = begin + length;
    ++trace_.spans;
  }

  TraceLimits limits_;
  Trace trace_;
};

/// Logs and traces of older programs do not say whose they are: ranks are all there is to compare.
bool is_of(Trace const& trace, TraceFile const& file) {
  if (trace.run_id != file.run_id) return false;
  return !file.run_id.empty() || file.ranks == 0 || trace.ranks.size() == static_cast<std::size_t>(file.ranks);
}

}  // namespace

std::optional<Trace> read_trace(std::istream& stream, TraceLimits limits) {
  Events events(limits);
  // The callback takes each event and refuses it, so that the parser frees it.
  auto const each = [&](int depth, Json::parse_event_t what, Json& parsed) {
    if (what != Json::parse_event_t::object_end) return true;
    if (depth == 1) events.take_header(parsed);
    if (depth != 2) return true;
    events.take(parsed);
    return false;
  };
  bool cut = false;
  try {
    cut = Json::parse(stream, each, false).is_discarded();           // the writer was killed, or still writes
    cut = cut || stream.peek() != std::istream::traits_type::eof();  // a NUL, which the parser takes for the end
  } catch (Enough const&) {
  }
  auto trace = events.finished();
  trace.cut = trace.cut || cut;
  if (trace.spans == 0) return std::nullopt;
  return trace;
}

FoundTrace read_first_trace(std::vector<TraceFile> const& files, std::filesystem::path const& folder) {
  FoundTrace found;
  for (auto const& file : files) {
    std::filesystem::path const path(file.file);
    std::string_view why = "does not exist";
    for (auto const& candidate : {path, folder / path.filename()}) {
      std::error_code ignored;
      if (!std::filesystem::is_regular_file(candidate, ignored)) continue;
      std::ifstream stream(candidate, std::ios::binary);
      auto trace = read_trace(stream);
      if (trace && is_of(*trace, file)) return {std::move(trace), {}};
      why = trace ? "belongs to another run" : "contains no steps";
    }
    if (found.missing.empty()) found.missing = fmt::format("The run's trace is not drawn: '{}' {}.", file.file, why);
  }
  return found;
}

}  // namespace transformer::report
