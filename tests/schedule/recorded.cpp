// SPDX-License-Identifier: Apache-2.0
// Recorded runs of a table of engines: events, waits and collectives order all accesses to each byte, on all ranks.
// Without a wait they do not: each is left out of the recording in turn.
// skip-sanitizers
// full-run: [recorded]
// timeout: 3600
#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/comm/local.hpp"
#include "fsdp/fsdp.hpp"
#include "fsdp/host/device.hpp"
#include "tests/catch.hpp"
#include "tests/schedule/table_row.hpp"
#include "tests/support/hazards.hpp"
#include "tests/support/recording.hpp"

namespace {

using engine_table::Precision;
using engine_table::Row;
using fsdp::testing::Hazards;
using Device = fsdp::testing::RecordingDevice<fsdp::host::Device>;
using Local = fsdp::local::Communicator<Device>;
using Comm = toy::Counting<fsdp::testing::Recorder<Local>>;

template <class P>
Hazards record(Row const& row) {
  Hazards::Recordings recordings(static_cast<std::size_t>(row.ranks));
  fsdp::local::run(
      row.ranks, [](int) { return Device{}; },
      [&](Local comm) {
        auto const rank = static_cast<std::size_t>(comm.rank());
        recordings[rank] = comm.device().recording;
        auto tally = std::make_shared<toy::Tally>();
        engine_table::Rank<Comm, P>(Comm(fsdp::testing::Recorder(std::move(comm)), tally), tally, row).train();
      });
  return Hazards(std::move(recordings));
}
Hazards record(Row const& row) {
  switch (row.precision) {
    case Precision::fp32:
    case Precision::fp32_in_bf16: return record<fsdp::Fp32>(row);
    case Precision::bf16:
    case Precision::bf16_in_fp16: return record<fsdp::Bf16>(row);
    case Precision::bf16_reduce: break;
  }
  return record<fsdp::Bf16Reduce>(row);
}

/// What nothing orders in a run of the row, a line each.
std::string unordered(fsdp::testing::TableRow const& at, Hazards const& hazards) {
  std::string lines;
  for (auto const& found : hazards.find()) lines += fmt::format("row {}: {}\n", engine_table::text(at), found);
  return lines;
}
void check(fsdp::testing::Table const& table) {
  std::string problems;
  int setting = 0;
  for (auto const& at : table) {
    auto row = engine_table::row_of(at);
    row.setting = setting = (setting + 1) % 3;
    if (problems.size() < 20000) problems += unordered(at, record(row));
  }
  CHECK(problems == "");
}

}  // namespace

TEST_CASE("recorded: no two accesses to a byte are unordered, and each site has waits without which some are") {
  std::string problems;
  std::vector<int> needed(static_cast<std::size_t>(fsdp::WaitSite::count_), 0);
  for (auto const& at : fsdp::testing::all_pairs(engine_table::axes)) {
    auto const hazards = record(engine_table::row_of(at));
    problems += unordered(at, hazards);
    for (auto const wait : hazards.waits(0))
      if (!hazards.find(wait, 1).empty()) ++needed[static_cast<std::size_t>(hazards.at(wait).site)];
  }
  CHECK(problems == "");
  for (std::size_t site = 1; site < needed.size(); ++site) {
    INFO(fsdp::wait_site_names[site]);
    auto const is = [&](fsdp::WaitSite one) { return site == static_cast<std::size_t>(one); };
    // Collectives are recorded whole.
    bool const inside = is(fsdp::WaitSite::collective_peer_ready) || is(fsdp::WaitSite::collective_peer_partial);
    CHECK((needed[site] > 0) == !inside);
  }
}

TEST_CASE("recorded: no two accesses to a byte are unordered, in engines at random") {
  check(engine_table::rows_at_random(100, 4));
}

TEST_CASE("recorded: nor in many more", "[.][recorded]") { check(engine_table::rows_at_random(5000, 5)); }
