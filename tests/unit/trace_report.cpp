// SPDX-License-Identifier: Apache-2.0
// The report's arithmetic is that of intervals: hand-made spans, times in milliseconds.
// skip-tsan
#include <string>
#include <vector>

#include "fsdp/trace.hpp"
#include "tests/catch.hpp"

namespace {

using fsdp::StreamKind;
using Spans = std::vector<fsdp::TraceSpan>;

constexpr double ms = 1e-3;

fsdp::TraceSpan span(std::string unit, std::string what, std::string pass, StreamKind kind, std::int64_t begin,
                     std::int64_t end, std::int64_t step = 0) {
  return {std::move(unit), std::move(what), std::move(pass), kind, 0, step, begin * 1'000'000, end * 1'000'000};
}
fsdp::TraceSpan gather(std::string unit, std::int64_t begin, std::int64_t end) {
  return span(std::move(unit), "all-gather", "forward", StreamKind::gather, begin, end);
}
fsdp::TraceSpan forward(std::string unit, std::int64_t begin, std::int64_t end) {
  return span(std::move(unit), "forward", "forward", StreamKind::compute, begin, end);
}
fsdp::TraceSpan backward(std::string unit, std::int64_t begin, std::int64_t end) {
  return span(std::move(unit), "backward", "backward", StreamKind::compute, begin, end);
}
fsdp::TraceSpan reduce(std::string unit, std::int64_t begin, std::int64_t end) {
  return span(std::move(unit), "reduce-scatter", "backward", StreamKind::reduce, begin, end);
}

/// Two units: each gather 4 ms, forward 5, backward 10, reduction 6, with the gather of b behind forward of a.
Spans step_of_two() {
  return {gather("a", 0, 4),     gather("b", 4, 8),   forward("a", 4, 9),    forward("b", 9, 14),
          backward("b", 14, 24), reduce("b", 24, 30), backward("a", 24, 34), reduce("a", 34, 40)};
}

}  // namespace

TEST_CASE("no spans, no times") {
  auto const report = fsdp::overlap_report({});
  CHECK(report.wall == 0.0);
  CHECK(report.units.empty());
  CHECK(report.exposed_share() == 0.0);
  CHECK(text(report).find("total") != std::string::npos);
}

TEST_CASE("exposed communication is what no compute covers") {
  auto const report = fsdp::overlap_report(step_of_two());
  CHECK(report.wall == Approx(40 * ms));
  CHECK(report.compute == Approx(30 * ms));
  CHECK(report.communication == Approx(20 * ms));
  CHECK(report.exposed == Approx(10 * ms));  // a's gather, a's reduction
  CHECK(report.overlapped() == Approx(40 * ms));
  CHECK(report.exposed_share() == Approx(0.5));
  CHECK(report.idle() == Approx(0.0).margin(1e-12));
  CHECK(report.steps == 1);
}

TEST_CASE("collectives at the same time count once; partial cover counts in part; gaps are idle") {
  Spans const spans{gather("a", 0, 10), forward("a", 10, 30), gather("b", 12, 22), reduce("b", 20, 34),
                    forward("b", 40, 41)};
  auto const report = fsdp::overlap_report(spans);
  CHECK(report.communication == Approx(32 * ms));
  CHECK(report.compute == Approx(21 * ms));
  CHECK(report.exposed == Approx(14 * ms));
  CHECK(report.exposed_share() == Approx(14.0 / 32.0));
  CHECK(report.idle() == Approx(6 * ms));
}

TEST_CASE("units and passes have rows in which exposed = t_overlapped - t_comp") {
  auto const report = fsdp::overlap_report(step_of_two());
  REQUIRE(report.units.size() == 2);
  auto const &a = report.units[0], &b = report.units[1];
  CHECK(a.name == "a");
  CHECK(a.communication == Approx(10 * ms));
  CHECK(a.compute == Approx(15 * ms));
  CHECK(a.exposed == Approx(10 * ms));
  CHECK(a.overlapped() == Approx(25 * ms));
  CHECK(b.name == "b");
  CHECK(b.communication == Approx(10 * ms));
  CHECK(b.exposed == Approx(0.0).margin(1e-12));
  REQUIRE(report.passes.size() == 2);
  CHECK(report.passes[0].name == "forward");
  CHECK(report.passes[0].exposed == Approx(4 * ms));
  CHECK(report.passes[1].name == "backward");
  CHECK(report.passes[1].exposed == Approx(6 * ms));
}

TEST_CASE("the last reduction of a backward pass is reported apart") {
  CHECK(fsdp::overlap_report(step_of_two()).final_reduction == Approx(6 * ms));

  // Two micro-steps: each has a last reduction; forward of the second covers part of the first's.
  Spans spans{backward("a", 0, 10), reduce("a", 10, 20), forward("a", 12, 16), backward("a", 20, 30),
              reduce("a", 30, 37)};
  CHECK(fsdp::overlap_report(spans).final_reduction == Approx(13 * ms));
  CHECK(fsdp::overlap_report(spans).exposed == Approx(13 * ms));

  // A reduction that another backward follows is none, though it is exposed; its tail beside the last one is not the
  // last one's.
  Spans const late{backward("b", 0, 10), reduce("b", 10, 30), backward("a", 10, 12), reduce("a", 28, 35)};
  auto const report = fsdp::overlap_report(late);
  CHECK(report.exposed == Approx(23 * ms));
  CHECK(report.final_reduction == Approx(5 * ms));

  // Replicas: the all-reduce of the last unit belongs to it.
  Spans const hybrid{backward("a", 0, 10), reduce("a", 10, 14),
                     span("a", "all-reduce", "backward", StreamKind::replicate, 14, 20)};
  CHECK(fsdp::overlap_report(hybrid).final_reduction == Approx(10 * ms));
}

TEST_CASE("local work of a communication stream is neither") {
  Spans const spans{span("a", "cast", "forward", StreamKind::gather, 0, 4), forward("a", 4, 9),
                    span("a", "accumulate", "backward", StreamKind::reduce, 9, 12)};
  auto const report = fsdp::overlap_report(spans);
  CHECK(report.communication == 0.0);
  CHECK(report.exposed == Approx(0.0).margin(1e-12));
  CHECK(report.compute == Approx(5 * ms));
  CHECK(report.idle() == Approx(7 * ms));
}

TEST_CASE("time between steps that are not traced is no time of a step") {
  auto spans = step_of_two();
  for (auto& s : step_of_two()) {
    s.step = 1, s.begin_ns += 1'000'000'000, s.end_ns += 1'000'000'000;
    spans.push_back(s);
  }
  CHECK(fsdp::overlap_report(spans).wall == Approx(80 * ms));
  for (auto& s : spans)
    if (s.step == 1) s.begin_ns -= 962'000'000, s.end_ns -= 962'000'000;  // from 38 on: the steps share two
  CHECK(fsdp::overlap_report(spans).wall == Approx(78 * ms));
}

TEST_CASE("the norm's all-reduce is communication, on whatever stream") {
  Spans const spans{span("gradient norm", "norm", "optimizer", StreamKind::compute, 0, 2),
                    span("gradient norm", "all-reduce", "optimizer", StreamKind::compute, 2, 5),
                    span("a", "optimizer", "optimizer", StreamKind::compute, 5, 9)};
  auto const report = fsdp::overlap_report(spans);
  CHECK(report.compute == Approx(6 * ms));
  CHECK(report.exposed == Approx(3 * ms));
  CHECK(report.final_reduction == Approx(0.0).margin(1e-12));
}

TEST_CASE("slowdown compares compute a step with a reference's") {
  auto slow = step_of_two();
  for (auto& s : step_of_two()) {
    s.step = 1, s.begin_ns += 50'000'000, s.end_ns += 50'000'000;
    slow.push_back(s);
  }
  for (auto& s : slow)
    if (s.unit == "a" && s.what == "backward") s.end_ns += 3'000'000;
  auto const reference = fsdp::overlap_report(step_of_two());
  CHECK(reference.slowdown == 0.0);
  auto const report = fsdp::overlap_report(slow, &reference);
  CHECK(report.steps == 2);
  CHECK(report.units[0].slowdown == Approx(18.0 / 15.0));
  CHECK(report.units[1].slowdown == Approx(1.0));
  CHECK(report.passes[1].slowdown == Approx(23.0 / 20.0));
  CHECK(report.slowdown == Approx(33.0 / 30.0));
}

TEST_CASE("the table has a line per unit and pass, in milliseconds a step") {
  auto spans = step_of_two();
  for (auto& s : step_of_two()) {
    s.step = 1, s.begin_ns += 50'000'000, s.end_ns += 50'000'000;
    spans.push_back(s);
  }
  auto const table = text(fsdp::overlap_report(spans));
  INFO(table);
  CHECK(table.find("a             10.000     15.000       25.000     10.000     100.0         -\n") !=
        std::string::npos);
  CHECK(table.find("total         20.000     30.000       40.000     10.000      50.0         -\n") !=
        std::string::npos);
  CHECK(table.find("2 steps of 40.000 ms: t_comm 20.000, t_comp 30.000, idle 0.000; exposed 10.000 ms (50.0 %): "
                   "6.000 ms after the last backward (unavoidable), 4.000 ms elsewhere\n") != std::string::npos);
}
