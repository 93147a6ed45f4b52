// SPDX-License-Identifier: Apache-2.0
// The trace holds a span for everything that moves or computes, and the report's arithmetic is that of intervals.
#include <map>
#include <string>
#include <vector>

#include "tests/catch.hpp"
#include "tests/support/local_run.hpp"

TEST_CASE("one step leaves a span for every gather, pass, reduction and update") {
  std::vector<fsdp::TraceSpan> spans;
  std::vector<std::string> units;
  std::map<std::string, int> counts;
  std::string events;
  std::size_t lost = 0;
  bool ordered = true;
  fsdp::local::run(2, fsdp::host::Device{}, [&](fsdp::local::Communicator<fsdp::host::Device> comm) {
    bool const first = comm.rank() == 0;
    fsdp::Mesh mesh(std::move(comm));
    auto engine = fsdp::make_engine<fsdp::FullShard>(mesh);
    toy::Network network(engine, {});
    fsdp::AdamW adamw(engine);
    engine.start_trace(1000);
    network.step(0);
    adamw.step();
    auto const mine = engine.collect_trace();
    engine.start_trace(3);
    network.step(1);
    engine.synchronize();
    if (!first) return;
    lost = engine.tracer()->lost();
    for (auto const& span : mine) {
      ++counts[std::string(name(span.kind)) + " " + std::string(span.what)];
      ordered = ordered && span.begin_ns > 0 && span.end_ns >= span.begin_ns;
    }
    events = fsdp::chrome_events(mine, 0);
  });
  CHECK(ordered);
  CHECK(counts == std::map<std::string, int>{{"compute backward", 6},
                                             {"compute forward", 6},
                                             {"compute optimizer", 5},
                                             {"gather all-gather", 5 + 3},
                                             {"reduce reduce", 5}});
  CHECK(lost == 22);  // 25 spans without the optimizer's, 3 kept
  CHECK(events.find("\"name\":\"all-gather layers.2\"") != std::string::npos);
}

TEST_CASE("exposed communication is what no compute covers") {
  using fsdp::StreamKind;
  std::vector<fsdp::TraceSpan> const spans{{"a", "all-gather", StreamKind::gather, 0, 10'000'000},
                                           {"a", "forward", StreamKind::compute, 10'000'000, 30'000'000},
                                           {"b", "all-gather", StreamKind::gather, 12'000'000, 22'000'000},
                                           {"b", "reduce", StreamKind::reduce, 20'000'000, 34'000'000}};
  auto const report = fsdp::overlap_report(spans);
  CHECK(report.wall == Approx(0.034));
  CHECK(report.compute == Approx(0.020));
  CHECK(report.communication == Approx(0.032));
  CHECK(report.exposed == Approx(0.014));
  CHECK(report.exposed_share() == Approx(14.0 / 32.0));
  CHECK(fsdp::overlap_report({}).wall == 0.0);
}
