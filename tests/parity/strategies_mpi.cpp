// SPDX-License-Identifier: Apache-2.0
// ranks: 3 4
// full-ranks: 1 2
// skip-sanitizers
// Processes reach the same bits as threads do, whatever the strategy, on one node and on pretended ones.
#include <cstring>
#include <vector>

#include "fsdp/mpi.hpp"
#include "tests/catch.hpp"
#include "tests/mpi_main.hpp"
#include "tests/support/local_run.hpp"

namespace {

/// Trains over all ranks, `ranks_per_node` of them sharing memory; rank 0's result is compared with that of as many
/// threads.
bool equals_threads(fsdp::ShardingStrategy const& strategy, toy::Run const& run, int ranks_per_node = 0) {
  fsdp::mpi::Options options;
  options.ranks_per_node = ranks_per_node;
  fsdp::mpi::Communicator world(test_environment(), {}, options);
  int const rank = world.rank(), ranks = world.size();
  auto const processes = toy::train(strategy, std::move(world), run);
  if (rank != 0) return true;
  auto const threads = toy::train_local(strategy, ranks, run);
  return !threads.empty() && processes.size() == threads.size() &&
         std::memcmp(processes.data(), threads.data(), threads.size() * sizeof(float)) == 0;
}

}  // namespace

TEST_CASE("50 clipped AdamW steps over processes equal those over threads, bitwise") {
  toy::Run run;
  int const ranks = test_environment().size();
  CHECK(equals_threads(fsdp::FullShard{}, run));
  CHECK(equals_threads(fsdp::ShardGradOp{}, run));
  CHECK(equals_threads(fsdp::NoShard{}, run));
  run.shard_group = ranks == 4 ? 2 : ranks;
  CHECK(equals_threads(fsdp::HybridShard<>{}, run));
}

TEST_CASE("no prefetch and many small buckets over processes") {
  toy::Run run;
  run.steps = 10;
  run.options.prefetch = 0;
  run.options.bucket_bytes = 1024;
  run.options.first_bucket_bytes = 256;
  CHECK(equals_threads(fsdp::FullShard{}, run));
  CHECK(equals_threads(fsdp::NoShard{}, run));
}

TEST_CASE("gradients that travel in bf16 over processes equal those over threads, bitwise") {
  toy::Run run;
  run.steps = 5;
  run.options.reduce_dtype = fsdp::DType::bf16;
  CHECK(equals_threads(fsdp::FullShard{}, run, 2));
  CHECK(equals_threads(fsdp::NoShard{}, run));
  run.shard_group = test_environment().size() == 4 ? 2 : test_environment().size();
  CHECK(equals_threads(fsdp::HybridShard<>{}, run));
}

TEST_CASE("micro-steps over processes, reducing each time or the last time alone") {
  toy::Run run;
  run.steps = 5;
  run.micro_steps = 3;
  CHECK(equals_threads(fsdp::FullShard{}, run));
  run.sync_last_only = true;
  run.options.allow_no_sync = true;
  CHECK(equals_threads(fsdp::FullShard{}, run));
  CHECK(equals_threads(fsdp::NoShard{}, run));
}

TEST_CASE("ranks on nodes of one and of two reach the same bits") {
  toy::Run run;
  run.steps = 5;
  for (int const per_node : {1, 2}) {
    CHECK(equals_threads(fsdp::FullShard{}, run, per_node));
    CHECK(equals_threads(fsdp::NoShard{}, run, per_node));
    run.shard_group = test_environment().size() == 4 ? 2 : 1;
    CHECK(equals_threads(fsdp::HybridShard<>{}, run, per_node));
  }
}
