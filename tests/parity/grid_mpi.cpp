// SPDX-License-Identifier: Apache-2.0
// ranks: 3 4
// Rows of the parity grid over processes: delays move no bit, and one rank on the whole batch agrees.
// skip-sanitizers
#include "tests/parity/grid.hpp"

#include "fsdp/mpi.hpp"
#include "tests/mpi_main.hpp"

namespace {

using namespace toy::grid;

/// A run over the first `ranks` processes; the others are there for nothing but the split.
template <class P>
Outcome train_processes(int ranks, Row const& row, std::uint64_t seed) {
  fsdp::mpi::Communicator world(test_environment());
  int const rank = world.rank();
  auto part = world.split(rank < ranks ? 0 : 1, rank, "part");
  if (rank >= ranks) return {};
  return train<P>(toy::Delayed(std::move(part), seed, seed == 0 ? 0 : most_delay_us), row);
}

/// CHECKs on rank 0 alone: the others know no parameters.
template <class P>
void check_processes(Row const& row, std::uint64_t seed) {
  int const ranks = test_environment().size();
  INFO(ranks << " processes, " << row.text());
  auto const plain = train_processes<P>(ranks, row, 0);
  auto const delayed = train_processes<P>(ranks, row, seed);
  auto const one = train_processes<P>(1, row, 0);
  if (test_environment().rank() != 0) return;
  CHECK(delayed.same_bits(plain));
  check_against_one<P>(plain, one, train_exactly(one, micro_steps(row)));
}

}  // namespace

TEST_CASE("rows of the parity grid over processes") {
  check_processes<fsdp::Fp32>({Sharding::full_shard, 2, Accumulation::synced, false}, 1);
  check_processes<fsdp::Bf16>({Sharding::shard_grad_op, 1, Accumulation::unsynced, true}, 2);
  check_processes<fsdp::Fp32>({Sharding::hybrid_shard, 0, Accumulation::synced, true}, 3);
  check_processes<fsdp::Bf16>({Sharding::no_shard, 1, Accumulation::none, true}, 4);
  check_processes<fsdp::Fp16>({Sharding::full_shard, 0, Accumulation::unsynced, false}, 5);
}
