// SPDX-License-Identifier: Apache-2.0
// The parity grid in fp32: all pairs of its axes' values, and with the label `full` all of it.
// full-run: [grid]
// timeout: 900
// skip-sanitizers
#include "tests/parity/grid.hpp"

TEST_CASE("all pairs of the parity grid in fp32") {
  toy::grid::check_rows<fsdp::Fp32>(toy::grid::fp32_axis, fsdp::testing::all_pairs(toy::grid::axes));
}

TEST_CASE("three ranks in fp32") { toy::grid::check_three_ranks<fsdp::Fp32>(7000); }

TEST_CASE("the whole parity grid in fp32", "[.][grid]") {
  toy::grid::check_rows<fsdp::Fp32>(toy::grid::fp32_axis, fsdp::testing::all_rows(toy::grid::axes));
}

TEST_CASE("strategies agree to the bit in fp32") { toy::grid::check_strategies_agree<fsdp::Fp32>(); }
