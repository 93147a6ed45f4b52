// SPDX-License-Identifier: Apache-2.0
// Counts allocations of a training run's steps after the first ones.
#pragma once

#include <utility>

#include "fsdp/fsdp.hpp"
#include "tests/catch.hpp"
#include "tests/support/allocations.hpp"
#include "tests/support/shard_group.hpp"
#include "tests/support/training.hpp"

namespace allocations {

/// A run whose backlogs, which differ from run to run, always fit a queue as it is made.
inline toy::Run small_run() {
  toy::Run run;
  run.shape.hidden = {17, 9};
  run.options.passes_ahead = 2;
  return run;
}

/// Trains with clipping and AdamW.
/// @param begins,ends  called where counting is to begin, after two steps, and to end, after six more; no work is under
/// way then on this rank
template <class Comm, class Begins, class Ends>
void train(fsdp::ShardingStrategy const& strategy, Comm comm, toy::Run const& run, Begins const& begins,
           Ends const& ends) {
  fsdp::Mesh<Comm> mesh(std::move(comm));
  fsdp::Engine<Comm> engine(mesh, fsdp::testing::in_groups_of(run.shard_group, strategy), run.options);
  toy::Network network(engine, run.shape);
  fsdp::AdamW adamw(engine);
  auto const step = [&](std::int64_t number) {
    if (run.evaluate_every > 0) {
      auto const scope = engine.evaluation();
      network.forward(1000 + number);
    }
    for (int micro = 0; micro < run.micro_steps; ++micro) {
      auto const waits = engine.no_sync(run.sync_last_only && micro + 1 < run.micro_steps);
      network.step(number * run.micro_steps + micro);
    }
    auto const norm = fsdp::clip_grad_norm(engine, 1.0f);
    adamw.step(1e-2f / static_cast<float>(number + 1), norm);
  };
  for (std::int64_t number = 0; number < 2; ++number) step(number);
  engine.synchronize();
  begins();
  for (std::int64_t number = 2; number < 8; ++number) step(number);
  engine.synchronize();
  ends();
}

/// The runs whose steps allocate nothing, with each strategy. @param test  called as test(strategy, run)
template <class Test>
void for_each_run(int ranks, Test const& test) {
  auto run = small_run();
  for (bool const accumulates : {false, true}) {
    if (accumulates) {
      run.micro_steps = 2;
      run.sync_last_only = run.options.allow_no_sync = true;
      run.evaluate_every = 1;
    }
    run.shard_group = 0;
    for (fsdp::ShardingStrategy const& strategy :
         {fsdp::ShardingStrategy(fsdp::FullShard{}), fsdp::ShardingStrategy(fsdp::ShardGradOp{}),
          fsdp::ShardingStrategy(fsdp::NoShard{})})
      test(strategy, run);
    if (ranks == 1) continue;
    run.shard_group = ranks / 2;
    test(fsdp::ShardingStrategy(fsdp::HybridShard<fsdp::FullShard>{}), run);
  }
}

}  // namespace allocations
