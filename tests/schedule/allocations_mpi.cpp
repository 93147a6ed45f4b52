// SPDX-License-Identifier: Apache-2.0
// ranks: 4
// full-ranks: 1 2
// skip-sanitizers
// The same over processes of a node.
#include "fsdp/mpi.hpp"
#include "tests/mpi_main.hpp"
#include "tests/schedule/allocations.hpp"

namespace allocations {
namespace {

using fsdp::testing::begin_counting;
using fsdp::testing::end_counting;

long in_steps(fsdp::ShardingStrategy const& strategy, toy::Run const& run) {
  long found = -1;
  train(
      strategy, fsdp::mpi::Communicator(test_environment()), run, [] { begin_counting(); },
      [&] { found = end_counting(); });
  return found;
}

}  // namespace

TEST_CASE("from the third step on nothing is allocated, whatever the strategy, over processes") {
  int const ranks = test_environment().size();
  for_each_run(ranks, [&](fsdp::ShardingStrategy const& strategy, toy::Run const& run) {
    INFO(strategy.name << ", " << ranks << " ranks, " << run.micro_steps << " micro-steps");
    CHECK(in_steps(strategy, run) == 0);
  });
}

}  // namespace allocations
