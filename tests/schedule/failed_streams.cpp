// SPDX-License-Identifier: Apache-2.0
// A task that throws on one rank, in any of the last steps: every rank is told, and no rank takes a step that another
// one does not take, unless the task is one of an update.
// full-run: [grid]
#include <chrono>
#include <cstddef>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/detail/host/backoff.hpp"
#include "fsdp/local.hpp"
#include "tests/catch.hpp"
#include "tests/support/all_pairs.hpp"
#include "tests/support/failing_cases.hpp"
#include "tests/support/temporary_folder.hpp"

namespace {

using fsdp::testing::TableRow;
using Comm = fsdp::local::Communicator<failing::Device>;

constexpr int ranks = 4;

/// @return what is wrong with a case; `thrown`: whether it has such a task
std::string problem(TableRow const& row, std::filesystem::path const& folder, bool& thrown) {
  auto planned = failing::case_of(row, ranks);
  if (planned.ending == failing::Ending::saves) {
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
  return fsdp::formatted("{}: {}\n", failing::text_of(planned), text);
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
  auto const table = fsdp::testing::all_pairs(failing::axes());
  check(table, table.size() / 2);
}

TEST_CASE("failed streams: all of them", "[.][grid]") {
  auto const table = fsdp::testing::all_rows(failing::axes());
  check(table, table.size() / 2);
}
