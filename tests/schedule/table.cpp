// SPDX-License-Identifier: Apache-2.0
// The program of a step against the engine that executes it, over a table of engines: collectives and bytes that it
// counts are those that go through the communicator, its memory is the account's at every use, and every use finds its
// parameters and gradients at the same address each time.
// skip-sanitizers
// full-run: [table]
// timeout: 3600
#include <fmt/format.h>

#include <cstddef>
#include <exception>
#include <memory>
#include <string>
#include <utility>

#include "fsdp/fsdp.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"
#include "tests/catch.hpp"
#include "tests/schedule/table_row.hpp"

namespace {

using engine_table::axes;
using engine_table::Precision;
using engine_table::Row;
using Device = fsdp::host::Device;
using Local = fsdp::local::Communicator<Device>;
using Comm = toy::Counting<Local>;

template <class P>
void run_row(Row const& row) {
  fsdp::local::run(row.ranks, Device{}, [&](Local comm) {
    auto tally = std::make_shared<toy::Tally>();
    engine_table::Rank<Comm, P>(Comm(std::move(comm), tally), tally, row).train();
  });
}

/// Errors of a row; "" if there are none.
std::string problem(fsdp::testing::TableRow const& at) {
  auto const row = engine_table::row_of(at);
  try {
    switch (row.precision) {
      case Precision::fp32:
      case Precision::fp32_in_bf16: run_row<fsdp::Fp32>(row); break;
      case Precision::bf16:
      case Precision::bf16_in_fp16: run_row<fsdp::Bf16>(row); break;
      case Precision::bf16_reduce: run_row<fsdp::Bf16Reduce>(row); break;
    }
  } catch (std::exception const& error) {
    return fmt::format("row {}: {}\n", engine_table::text(at), error.what());
  }
  return {};
}

void check(fsdp::testing::Table const& table) {
  std::string problems;
  for (auto const& at : table)
    if (problems.size() < 20000) problems += problem(at);
  CHECK(problems == "");
}

}  // namespace

TEST_CASE("table: the engine does what its program says, for all pairs of what engines differ in") {
  check(fsdp::testing::all_pairs(axes));
}

TEST_CASE("table: the engine does what its program says, for engines at random") {
  check(engine_table::rows_at_random(300, 1));
}

TEST_CASE("table: the engine does what its program says, for 50,000 engines at random", "[.][table]") {
  check(engine_table::rows_at_random(50000, 2));
}
