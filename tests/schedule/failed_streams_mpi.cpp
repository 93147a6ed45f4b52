// SPDX-License-Identifier: Apache-2.0
// ranks: 4
// full-ranks: 3
// skip-sanitizers
// full-run: [grid]
// timeout: 1800
// Over processes of one node, and of several: a task that throws on one rank is every rank's failure. The cases are
// those of threads.
#include <array>
#include <cstddef>
#include <exception>
#include <filesystem>
#include <string>
#include <vector>

#include "fsdp/mpi.hpp"
#include "tests/catch.hpp"
#include "tests/mpi_main.hpp"
#include "tests/support/failing_cases.hpp"
#include "tests/support/temporary_folder.hpp"

namespace {

using Comm = fsdp::mpi::BasicCommunicator<failing::Device>;

/// An Outcome, for MPI.
struct Sent {
  int least = 0, most = 0, thrown = 0;
  std::array<char, 600> error{}, wrong{}, left{};
};
void write(std::array<char, 600>& to, std::string const& text) { text.copy(to.data(), to.size() - 1); }

/// Runs one case on all ranks. @return what is wrong; `thrown`: whether the case has the task that is to throw
std::string problem(failing::Case planned, int ranks_per_node, std::filesystem::path const& folder, bool& thrown) {
  auto& environment = test_environment();
  if (planned.ending == failing::Ending::saves) {
    planned.folder = folder;
    if (environment.rank() == 0) std::filesystem::remove_all(folder);
  }
  MPI_Barrier(MPI_COMM_WORLD);
  failing::Plan plan;
  failing::Outcome outcome;
  try {
    fsdp::mpi::Options options;
    options.ranks_per_node = ranks_per_node;
    run_rank(Comm(environment, {{}, &plan}, options), plan, planned, outcome);
  } catch (std::exception const&) {  // in outcome.error
  }
  Sent own{outcome.least, outcome.most, outcome.thrown ? 1 : 0, {}, {}, {}};
  write(own.error, outcome.error);
  write(own.wrong, outcome.wrong);
  auto& left = fsdp::mpi::detail::deferred_failure();
  if (left.failed()) write(own.left, left.text);
  left.forget();
  std::vector<Sent> all(static_cast<std::size_t>(environment.size()));
  MPI_Allgather(&own, sizeof(Sent), MPI_BYTE, all.data(), sizeof(Sent), MPI_BYTE, MPI_COMM_WORLD);
  std::vector<failing::Outcome> outcomes;
  std::string text;
  for (auto const& sent : all) {
    outcomes.push_back({sent.error.data(), sent.wrong.data(), sent.least, sent.most, sent.thrown != 0});
    std::string const reported = sent.left.data();
    if (!reported.empty() && reported.find("boom") == std::string::npos)
      text += fsdp::formatted("rank {} reports: {}. ", outcomes.size() - 1, reported);
  }
  auto const& first = all[static_cast<std::size_t>(planned.rank)];
  thrown = first.thrown != 0;
  std::string const report = first.error[0] != '\0' ? first.error.data() : first.left.data();
  return text + judge(planned, outcomes, report);
}

/// The axes of failing::axes(), and whether all ranks are on one node, or each is on its own.
fsdp::testing::Axes axes() {
  auto axes = failing::axes();
  axes.push_back(2);
  return axes;
}

/// @param rows  of axes()
void check(fsdp::testing::Table const& rows) {
  fsdp::testing::TemporaryFolder const own;  // rank 0's is used
  std::string path = own.path.string();
  path.resize(200);
  MPI_Bcast(path.data(), 200, MPI_CHAR, 0, MPI_COMM_WORLD);
  std::filesystem::path const folder = path.c_str();
  std::string problems;
  std::size_t cases = 0;
  for (auto const& row : rows) {
    auto const planned = failing::case_of(row, test_environment().size());
    int const ranks_per_node = row.back() == 0 ? 0 : 1;
    bool thrown = false;
    auto const text = problem(planned, ranks_per_node, folder / "run", thrown);
    if (!text.empty())
      problems += fsdp::formatted("{}, ranks per node {}: {}\n", failing::text_of(planned), ranks_per_node, text);
    if (thrown) ++cases;
  }
  CHECK(problems == "");
  CHECK(cases >= rows.size() / 2);
}

}  // namespace

TEST_CASE("mpi: failed streams: all ranks are told, and end with the same weights; all pairs") {
  check(fsdp::testing::all_pairs(axes()));
}

TEST_CASE("mpi: failed streams: all of them", "[.][grid]") { check(fsdp::testing::all_rows(axes())); }
