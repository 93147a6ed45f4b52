// SPDX-License-Identifier: Apache-2.0
// A timeline of a step for every rank: compute, hidden and exposed communication.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "fsdp/trace.hpp"
#include "transformer/report/trace_reader.hpp"

namespace transformer::report {

/// One step out of a trace: of those that every rank has spans of the one of middle length.
struct TracedStep {
  std::int64_t step = 0;
  std::int64_t begin_ns = 0, end_ns = 0;
  std::vector<std::vector<fsdp::TraceSpan>> ranks;  ///< as in the trace
};
/// @pre the trace has spans
TracedStep typical_step(Trace const& trace);

/// Each rank's figures over all steps of the trace; no steps where a rank has no spans.
std::vector<fsdp::OverlapReport> overlap_of(Trace const& trace);

inline constexpr std::size_t most_ranks_drawn = 8;

/// @param width  pixels; the height follows from the ranks, of which most_ranks_drawn are drawn at most
std::string timeline_svg(TracedStep const& step, double width);

/// A timeline as a part of another SVG.
struct Drawn {
  std::string content;
  double height = 0;
};
Drawn timeline_drawing(TracedStep const& step, double width);

}  // namespace transformer::report
