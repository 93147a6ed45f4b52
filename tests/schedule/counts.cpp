// SPDX-License-Identifier: Apache-2.0
// Collectives per step, counted at the communicator; and their order.
#include <memory>
#include <string>
#include <vector>

#include "tests/catch.hpp"
#include "tests/support/counting.hpp"
#include "tests/support/local_run.hpp"

namespace {

using Local = fsdp::local::Communicator<fsdp::host::Device>;
using Counted = toy::Counting<Local>;

/// Rank 0's tally of one training step after a first one.
template <class S>
toy::Tally one_step(int ranks, toy::Run run) {
  toy::Tally result;
  fsdp::local::run(ranks, fsdp::host::Device{}, [&](Local comm) {
    bool const first = comm.rank() == 0;
    auto tally = std::make_shared<toy::Tally>();
    fsdp::Mesh<Counted> mesh(Counted(std::move(comm), tally), {.shard_group = run.shard_group});
    fsdp::Engine<S, Counted> engine(mesh, run.options);
    toy::Network network(engine, run.shape);
    fsdp::AdamW adamw(engine);
    for (int step = 0; step < 2; ++step) {
      tally->entries.clear();
      for (int micro = 0; micro < run.micro_steps; ++micro) {
        if (run.sync_last_only) engine.set_gradient_sync(micro + 1 == run.micro_steps);
        network.step(step);
      }
      fsdp::clip_grad_norm(engine, 1.0f);
      adamw.step();
    }
    engine.synchronize();
    if (first) result = *tally;
  });
  return result;
}

struct Expected {
  std::size_t gather_forward, gather_backward, scatter, reduce;
};

void check(toy::Tally const& tally, Expected expected) {
  CHECK(tally.count("all_gather", "forward") == expected.gather_forward);
  CHECK(tally.count("all_gather", "backward") == expected.gather_backward);
  CHECK(tally.count("reduce_scatter") == expected.scatter);
  CHECK(tally.count("all_reduce") == expected.reduce);
  CHECK(tally.count("broadcast") == 0);
}

}  // namespace

TEST_CASE("collectives per step follow the table of docs/strategies.md") {
  toy::Run run;  // a tied root and 4 blocks: L = 5 units
  std::size_t const L = 5;
  int const ranks = GENERATE(2, 4);
  check(one_step<fsdp::FullShard>(ranks, run), {L, L - 2, L, 0});
  check(one_step<fsdp::ShardGradOp>(ranks, run), {L, 0, L, 0});
  run.options.bucket_bytes = 4096;
  run.options.first_bucket_bytes = 1024;
  auto const ddp = one_step<fsdp::NoShard>(ranks, run);
  std::int64_t elements = 0;
  for (auto const& entry : ddp.entries)
    if (entry.operation == "all_reduce" && entry.unit != "gradient norm")
      elements += static_cast<std::int64_t>(entry.count);
  auto const total = 4 * fsdp::align_up(fsdp::align_up(13 * 29, 64) + fsdp::align_up(29, 64) + 13 * 29, 64 * ranks) +
                     fsdp::align_up(fsdp::align_up(11 * 13, 64) + 11, 64 * ranks);
  CHECK(elements == total);
  check(ddp, {0, 0, 0, 1 + static_cast<std::size_t>((total * 4 - 1024 + 4095) / 4096)});
  run.options = {};
  run.options.keep_last = false;
  check(one_step<fsdp::FullShard>(ranks, run), {L, L - 1, L, 0});
  run.options.keep_root = false;
  check(one_step<fsdp::FullShard>(ranks, run), {L + 1, L, L, 0});
}

TEST_CASE("a hybrid group of two adds one all-reduce a unit") {
  toy::Run run;
  run.shard_group = 2;
  check(one_step<fsdp::HybridShard<fsdp::FullShard>>(4, run), {5, 3, 5, 5});
  check(one_step<fsdp::HybridShard<fsdp::ShardGradOp>>(4, run), {5, 0, 5, 5});
}

TEST_CASE("one rank communicates nothing") {
  toy::Run run;
  check(one_step<fsdp::FullShard>(1, run), {0, 0, 0, 0});
  check(one_step<fsdp::ShardGradOp>(1, run), {0, 0, 0, 0});
  check(one_step<fsdp::NoShard>(1, run), {0, 0, 0, 0});
}

TEST_CASE("micro-steps repeat the gathers, and reduce each time or once") {
  toy::Run run;
  run.micro_steps = 3;
  check(one_step<fsdp::FullShard>(2, run), {15, 9, 15, 0});
  run.sync_last_only = true;
  run.options.accumulate_unsharded = true;
  check(one_step<fsdp::FullShard>(2, run), {15, 9, 5, 0});
  check(one_step<fsdp::ShardGradOp>(2, run), {15, 0, 5, 0});
}

TEST_CASE("the order of gathers and reductions over three blocks") {
  toy::Run run;
  run.shape.hidden = {29, 29, 29};
  auto const tally = one_step<fsdp::FullShard>(2, run);
  CHECK(tally.order("forward") == std::vector<std::string>{"all_gather root", "all_gather layers.0",
                                                           "all_gather layers.1", "all_gather layers.2"});
  CHECK(tally.order("backward") == std::vector<std::string>{"all_gather layers.1", "reduce_scatter layers.2",
                                                            "all_gather layers.0", "reduce_scatter layers.1",
                                                            "reduce_scatter layers.0", "reduce_scatter root"});
}
