// SPDX-License-Identifier: Apache-2.0
// skip-tsan
// needs: nlohmann_json
// The trace file is Chrome's format, with every rank, and nothing in it overlaps that cannot.
#include "tests/schedule/trace_file.hpp"

#include "tests/catch.hpp"
#include "tests/support/local_run.hpp"

TEST_CASE("all ranks' spans are in one file, on one clock, stream by stream") {
  for (int const ranks : {1, 2, 3}) {
    std::string file;
    int files = 0;
    fsdp::local::run(ranks, fsdp::host::Device{}, [&](fsdp::local::Communicator<fsdp::host::Device> comm) {
      bool const first = comm.rank() == 0;
      auto text = toy::traced_run(std::move(comm));
      if (!first) return;
      file = std::move(text);
      ++files;
    });
    INFO(ranks << " ranks");
    CHECK(files == 1);
    CHECK(toy::faults(file, ranks) == "");
  }
}

TEST_CASE("a fault in a trace file is found") {
  fsdp::TraceSpan const one{"u", "forward", "forward", fsdp::StreamKind::compute, 0, 0, 1000, 5000};
  auto two = one;
  two.begin_ns = 3000, two.end_ns = 6000;
  CHECK(toy::faults(fsdp::chrome_trace({{one, two}}), 1).find("overlap") != std::string::npos);
  CHECK(toy::faults(fsdp::chrome_trace({{one}}), 2).find("rank 1 has no name") != std::string::npos);
  two.begin_ns = 6000, two.end_ns = 5500;
  CHECK(toy::faults(fsdp::chrome_trace({{one, two}}), 1).find("negative") != std::string::npos);
  two = one;
  two.begin_ns += 1'000'000, two.end_ns += 1'000'000;
  CHECK(toy::faults(fsdp::chrome_trace({{one}, {two}}), 2).find("another clock") != std::string::npos);
  CHECK(toy::faults("{", 1) == "it is no JSON");
}

TEST_CASE("names are escaped, times have nanoseconds and begin at 0") {
  fsdp::TraceSpan const span{
      "a \"quoted\\\"\nname", "forward", "forward", fsdp::StreamKind::compute, 12, 3, 5'000'000'000'000'001,
      5'000'000'000'001'235};
  auto const json = nlohmann::json::parse(fsdp::chrome_trace({{span}}));
  auto const& event = json.at("traceEvents").back();
  CHECK(event.at("name") == "forward a \"quoted\\\"\nname");
  CHECK(event.at("args").at("unit") == "a \"quoted\\\"\nname");
  CHECK(event.at("args").at("bytes") == 12);
  CHECK(event.at("args").at("step") == 3);
  CHECK(event.at("ts").get<double>() == 0.0);
  CHECK(event.at("dur").get<double>() == Approx(1.234));
}

TEST_CASE("spans survive the way over the control plane") {
  fsdp::TraceSpan const span{"12 a\n", "", "backward", fsdp::StreamKind::replicate, -1, 9, 100, 200};
  auto const back = fsdp::detail::unpack(fsdp::detail::pack({span, span}), 50);
  REQUIRE(back.size() == 2);
  CHECK(back[1].unit == "12 a\n");
  CHECK(back[1].what.empty());
  CHECK(back[1].pass == "backward");
  CHECK(back[1].kind == fsdp::StreamKind::replicate);
  CHECK(back[1].bytes == -1);
  CHECK(back[1].step == 9);
  CHECK(back[1].begin_ns == 150);
  CHECK(back[1].end_ns == 250);
  CHECK_THROWS_AS(fsdp::detail::unpack(fsdp::detail::pack({span}).substr(0, 20), 0), fsdp::UsageError);
}

TEST_CASE("clocks that bounds allow to be the same are the same; others differ by the middle") {
  fsdp::detail::ClockOffset offset;
  offset.at_least(-20), offset.at_most(35);
  CHECK(offset.value() == 0);
  offset.at_least(5);
  CHECK(offset.value() == 20);
  offset.at_least(-100), offset.at_most(25);
  CHECK(offset.value() == 15);
}

TEST_CASE("another machine's clock is found from exchanges") {
  // The other clock shows 1,000,000 less: the bounds are 1,000,040 from the first round, 999,960 from the second.
  CHECK(fsdp::detail::clock_offset("2000000 2000090 2000200 2000260 ", "1000050 1000095 1000190 1000240 ") ==
        1'000'000);
  CHECK(fsdp::detail::clock_offset("2000 2090 ", "2050 2095 ") == 0);
}
