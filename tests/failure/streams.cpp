// SPDX-License-Identifier: Apache-2.0
// A task that throws on one rank, in any of the last steps: every rank is told, and no rank takes a step that another
// one does not take, unless the task is one of an update.
// full-run: [grid]
#include <array>
#include <chrono>
#include <cstddef>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/comm/local.hpp"
#include "fsdp/host/backoff.hpp"
#include "tests/catch.hpp"
#include "tests/support/all_pairs.hpp"
#include "tests/support/failing_step.hpp"
#include "tests/support/temporary_folder.hpp"

namespace {

using failing::Case;
using failing::Ending;
using fsdp::testing::TableRow;
using Comm = fsdp::local::Communicator<failing::Device>;

struct Place {
  std::string_view phase, stream;
};
constexpr std::array places{Place{"forward", "compute"},   Place{"forward", "gather"},  Place{"backward", "compute"},
                            Place{"backward", "gather"},   Place{"backward", "reduce"}, Place{"backward", "replicate"},
                            Place{"optimizer", "compute"}, Place{"norm", "compute"}};
constexpr int ranks = 4;

/// Strategies, places, places among the tasks, steps, endings, and whether gradients are clipped.
fsdp::testing::Axes const axes{5, places.size(), 3, 4, 4, 2};

Case case_of(TableRow const& row) {
  Case planned;
  switch (row[0]) {
    case 0: planned.strategy = fsdp::FullShard{}; break;
    case 1: planned.strategy = fsdp::ShardGradOp{}; break;
    case 2: planned.strategy = fsdp::HybridShard<>{.group = 2}; break;
    case 3: planned.strategy = fsdp::HybridShard<fsdp::ShardGradOp>{.group = 2}; break;
    default: planned.strategy = fsdp::NoShard{}; break;
  }
  planned.phase = places[row[1]].phase;
  planned.stream = places[row[1]].stream;
  planned.place = static_cast<int>(row[2]);
  planned.step = Case::steps - 4 + static_cast<int>(row[3]);
  planned.ending = static_cast<Ending>(row[4]);
  planned.clips = row[5] == 1 || planned.phase == "norm";
  planned.rank = static_cast<int>(row[2] + row[3]) % ranks;
  return planned;
}

/// @return what is wrong with a case; `thrown`: whether it has such a task
std::string problem(TableRow const& row, std::filesystem::path const& folder, bool& thrown) {
  auto planned = case_of(row);
  if (planned.ending == Ending::saves) {
    planned.folder = folder;
    std::filesystem::remove_all(folder);
  }
  std::vector<failing::Outcome> outcomes(ranks);
  std::vector<failing::Plan> plans(ranks);
  auto const device_of = [&](int rank) { return failing::Device{{}, &plans[static_cast<std::size_t>(rank)]}; };
  std::string report;
  try {
    fsdp::local::run(ranks, device_of, [&](Comm comm) {
      auto const at = static_cast<std::size_t>(comm.rank());
      run_rank(std::move(comm), plans[at], planned, outcomes[at]);
    });
  } catch (std::exception const& error) {
    report = error.what();
  }
  thrown = outcomes[static_cast<std::size_t>(planned.rank)].thrown;
  auto const text = judge(planned, outcomes, report);
  if (text.empty()) return {};
  return fsdp::formatted("{}, {} on {}, place {}, step {}, ending {}, clips {}: {}\n", planned.strategy.name,
                         planned.phase, planned.stream, planned.place, planned.step, static_cast<int>(planned.ending),
                         planned.clips, text);
}

/// @param least  cases that have the task that is to throw
void check(fsdp::testing::Table const& table, std::size_t least) {
  fsdp::host::set_wait_deadline(std::chrono::seconds(60));
  fsdp::testing::TemporaryFolder const folder;
  std::string problems;
  std::size_t failed = 0;
  for (auto const& row : table) {
    bool thrown = false;
    problems += problem(row, folder.path / "run", thrown);
    if (thrown) ++failed;
  }
  CHECK(problems == "");
  CHECK(failed >= least);
}

}  // namespace

TEST_CASE("failed streams: all ranks are told, and end with the same weights; all pairs") {
  auto const table = fsdp::testing::all_pairs(axes);
  check(table, table.size() / 2);
}

TEST_CASE("failed streams: all of them", "[.][grid]") {
  auto const table = fsdp::testing::all_rows(axes);
  check(table, table.size() / 2);
}
