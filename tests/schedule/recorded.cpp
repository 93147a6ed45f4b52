// SPDX-License-Identifier: Apache-2.0
// Recorded runs of a table of engines: events, waits and collectives order all accesses to each byte, on all ranks.
// Each derived wait is left out of the recording in turn: then a pair of accesses is unordered. unneeded() lists the
// few kinds of waits for which this does not hold.
// skip-sanitizers
// full-run: [recorded]
// timeout: 3600
#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/fsdp.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"
#include "tests/catch.hpp"
#include "tests/schedule/table_row.hpp"
#include "tests/support/hazards.hpp"
#include "tests/support/recording.hpp"

namespace {

using engine_table::Precision;
using engine_table::Row;
using fsdp::testing::Enqueued;
using fsdp::testing::Hazards;
using Device = fsdp::testing::RecordingDevice<fsdp::host::Device>;
using Local = fsdp::local::Communicator<Device>;
using Comm = toy::Counting<fsdp::testing::Recorder<Local>>;

template <class P>
Hazards record(Row const& row, int steps) {
  Hazards::Recordings recordings(static_cast<std::size_t>(row.ranks));
  fsdp::local::run(
      row.ranks, [](int) { return Device{}; },
      [&](Local comm) {
        auto const rank = static_cast<std::size_t>(comm.rank());
        recordings[rank] = comm.device().recording;
        auto tally = std::make_shared<toy::Tally>();
        engine_table::Rank<Comm, P>(Comm(fsdp::testing::Recorder(std::move(comm)), tally), tally, row).train(steps);
      });
  return Hazards(std::move(recordings));
}
Hazards record(Row const& row, int steps = 3) {
  switch (row.precision) {
    case Precision::fp32:
    case Precision::fp32_in_bf16: return record<fsdp::Fp32>(row, steps);
    case Precision::bf16:
    case Precision::bf16_in_fp16: return record<fsdp::Bf16>(row, steps);
    case Precision::bf16_reduce: break;
  }
  return record<fsdp::Bf16Reduce>(row, steps);
}

/// One line for each pair of accesses that no stream, event or collective orders in a run of the row.
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

/// The wait is inside a collective. Collectives are recorded whole.
bool is_inside(fsdp::WaitSite site) {
  return site == fsdp::WaitSite::collective_peer_ready || site == fsdp::WaitSite::collective_peer_partial;
}
/// A wait of an optimizer that has collectives of its own: waits.cpp tests it.
bool is_of_optimizers(fsdp::WaitSite site) {
  return site == fsdp::WaitSite::optimizer_exchange || site == fsdp::WaitSite::optimizer_peers_read;
}
/// The wait follows from accesses. Others are written by hand: at the end of a run, and before a norm is measured
/// again.
bool is_derived(fsdp::WaitSite site) {
  return site != fsdp::WaitSite::none && site != fsdp::WaitSite::norm_peers_read && !is_inside(site) &&
         !is_of_optimizers(site);
}

/// Lists errors of derived waits, and counts by site the waits that rank 0 needs. Each derived wait must be needed:
/// without it, accesses to some byte are unordered. It is left out on rank 0, and, if all accesses are still
/// ordered, on all ranks: the others may need the same wait before a collective begins, and on some ranks an access and
/// the next content of a slot share no bytes.
///
/// These waits are not needed, but an engine cannot find that out, or need not:
/// - before later ones that imply it, for the same operation, or for the buffer's open before it: a buffer's open waits
///   by itself; and when all peers have ended a collective, so has this rank;
/// - for what the host has waited for: initial parameters, and whatever it waits for lest it come too far ahead;
/// - for peers, if their order follows from collectives of other communicators or from what peers' hosts have waited
///   for (see [Note: Order among peers]). A stream never waits twice until the peers have ended one collective.
///
/// @param hazards  of a row without padding: modules do not access it, but operations say that they do
std::string unneeded(fsdp::testing::TableRow const& at, Hazards const& hazards, std::vector<int>& needed) {
  std::string lines;
  std::map<std::pair<int, std::string>, std::uint64_t> ended;  // by stream and communicator: the last collective
  auto const ranks = hazards.known_waits();
  auto const needed_waits = hazards.needed_waits(0);
  for (std::size_t i = 0; i < ranks[0].size(); ++i) {
    auto const [wait, known] = ranks[0][i];
    auto const& entry = hazards.at(wait);
    if (entry.site == fsdp::WaitSite::none) continue;
    bool const is_needed = needed_waits[wait.entry];
    if (is_needed) ++needed[static_cast<std::size_t>(entry.site)];
    if (!is_derived(entry.site)) continue;
    auto const wrong = [&](std::string_view what) {
      lines +=
          fmt::format("row {}: entry {}, {}, {}\n", engine_table::text(at), wait.entry, fsdp::name(entry.site), what);
    };
    bool const for_peers = entry.kind == Enqueued::Kind::wait_for_peers;
    if (for_peers) {
      auto& last = ended[{entry.stream, entry.communicator}];
      if (entry.sequence <= last) wrong("waits for what it has waited for");
      last = std::max(last, entry.sequence);
    }
    if (is_needed) continue;
    if (known == Hazards::Known::later_waits || known == Hazards::Known::host) continue;
    if (known == Hazards::Known::stream && for_peers) continue;
    std::vector<Hazards::At> same;
    for (auto const& waits : ranks) same.push_back(waits[i].at);
    if (hazards.find(same, 1).empty()) wrong(known == Hazards::Known::stream ? "is known" : "is not needed");
  }
  return lines;
}
/// Checks each row of a table, with units without padding. Two steps contain every wait: the second one follows a step.
std::string unneeded(fsdp::testing::Table const& table, std::vector<int>& needed) {
  std::string problems;
  int setting = 0;
  for (auto const& at : table) {
    auto row = engine_table::row_of(at);
    row.elements = 768;
    row.setting = setting = (setting + 1) % 3;
    if (problems.size() < 20000) problems += unneeded(at, record(row, 2), needed);
  }
  return problems;
}

}  // namespace

TEST_CASE("recorded: no two accesses to a byte are unordered, for all pairs of what engines differ in") {
  check(fsdp::testing::all_pairs(engine_table::axes));
}

TEST_CASE("recorded: without any wait that follows from accesses, some are unordered") {
  std::vector<int> needed(static_cast<std::size_t>(fsdp::WaitSite::count_), 0);
  CHECK(unneeded(fsdp::testing::all_pairs(engine_table::axes), needed) == "");
  // Few engines need a wait for a wire (replicas of shards, whose gradients are rounded), for peers that still sum a
  // slot which the replicas' stream zeroes, or for a kept slice.
  CHECK(unneeded({{2, 0, 3, 1, 0, 0, 0, 0, 3, 0, 0, 0, 0},
                  {2, 0, 3, 0, 0, 0, 0, 0, 3, 0, 1, 0, 0},
                  {2, 3, 3, 0, 1, 4, 1, 0, 1, 3, 2, 1, 0},
                  {0, 0, 3, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0}},
                 needed) == "");
  for (std::size_t site = 1; site < needed.size(); ++site) {
    INFO(fsdp::wait_site_names[site]);
    bool const of_others =
        is_inside(static_cast<fsdp::WaitSite>(site)) || is_of_optimizers(static_cast<fsdp::WaitSite>(site));
    CHECK((needed[site] > 0) == !of_others);
  }
}

TEST_CASE("recorded: no two accesses to a byte are unordered, in engines at random") {
  check(engine_table::rows_at_random(40, 4));
}

TEST_CASE("recorded: no two accesses to a byte are unordered, in 5,100 engines at random", "[.][recorded]") {
  check(engine_table::rows_at_random(5100, 5));
}

TEST_CASE("recorded: without any wait some accesses are unordered, in many more engines", "[.][recorded]") {
  std::vector<int> needed(static_cast<std::size_t>(fsdp::WaitSite::count_), 0);
  CHECK(unneeded(engine_table::rows_at_random(560, 6), needed) == "");
}

TEST_CASE("recorded: what peers read of a collective counts, whichever rank ends it first") {
  using Kind = Enqueued::Kind;
  std::vector<fsdp::testing::Access> const read{{16, 32, false}}, written{{16, 32, true}};
  auto const hazards_of = [&](bool waits, std::size_t writer) {
    Hazards::Recordings recordings;
    for (std::size_t rank = 0; rank < 2; ++rank) {
      // Ranks are threads, but each has memory of its own.
      auto const own = [&](std::vector<fsdp::testing::Access> accesses) {
        for (auto& access : accesses) access.begin += 100 * rank, access.end += 100 * rank;
        return accesses;
      };
      auto const recording = std::make_shared<fsdp::testing::Recording>();
      recording->streams = {"reduce"};
      Enqueued entry{.kind = Kind::collective, .stream = 0, .communicator = "world", .members = 2, .sequence = 1};
      entry.member = static_cast<int>(rank);
      entry.accesses = own(written);
      entry.input = own(read);
      recording->add(entry);
      entry.kind = Kind::wait_for_peers;
      if (waits) recording->add(entry);
      if (rank == writer) recording->add({.kind = Kind::operation, .stream = 0, .accesses = own(written)});
      recordings.push_back(recording);
    }
    return Hazards(std::move(recordings));
  };
  for (auto const writer : {std::size_t{0}, std::size_t{1}}) {
    CHECK(hazards_of(true, writer).find().empty());
    CHECK(hazards_of(false, writer).find().size() == 1);
  }
}
