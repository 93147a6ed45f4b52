// SPDX-License-Identifier: Apache-2.0
// The parity grid in bf16: all pairs of its axes' values, and with the label `full` all of it.
// full-run: [grid]
// skip-sanitizers
// timeout: 900
#include "tests/parity/grid.hpp"

TEST_CASE("all pairs of the parity grid in bf16") {
  toy::grid::check_rows<fsdp::Bf16>(toy::grid::bf16_axis, fsdp::testing::all_pairs(toy::grid::axes));
}

TEST_CASE("three ranks in bf16") { toy::grid::check_three_ranks<fsdp::Bf16>(7000); }

TEST_CASE("the whole parity grid in bf16", "[.][grid]") {
  toy::grid::check_rows<fsdp::Bf16>(toy::grid::bf16_axis, fsdp::testing::all_rows(toy::grid::axes));
}

TEST_CASE("strategies agree to the bit in bf16") { toy::grid::check_strategies_agree<fsdp::Bf16>(); }
