// SPDX-License-Identifier: Apache-2.0
// Collectives per step, counted at the communicator; and their order.
// skip-sanitizers
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/catch.hpp"
#include "tests/support/backward_flags.hpp"
#include "tests/support/counting.hpp"
#include "tests/support/local_run.hpp"
#include "tests/support/shard_group.hpp"

namespace {

using Local = fsdp::local::Communicator<fsdp::host::Device>;
using Counted = toy::Counting<Local>;

/// Opens scopes of an engine, and knows the flags of the micro-step that comes of them.
template <class E>
struct Flags : fsdp::testing::BackwardScopes<E> {
  using fsdp::testing::BackwardScopes<E>::BackwardScopes;
  fsdp::StepFlags start = fsdp::flags_after(fsdp::plain_step);
  fsdp::StepFlags step_flags() const { return start | this->flags().step_flags(); }
};

/// Rank 0's tally of one training step after a first one. `before(flags, last)` is called before each micro-step. What
/// the program counts must be what was counted, on every rank and in every pass.
template <class Before>
toy::Tally one_step(fsdp::ShardingStrategy const& strategy, int ranks, toy::Run run, Before before) {
  toy::Tally result;
  fsdp::local::run(ranks, fsdp::host::Device{}, [&](Local comm) {
    bool const first = comm.rank() == 0;
    auto tally = std::make_shared<toy::Tally>();
    fsdp::Mesh<Counted> mesh(Counted(std::move(comm), tally));
    fsdp::Engine<Counted> engine(mesh, fsdp::testing::in_groups_of(run.shard_group, strategy), run.options);
    toy::Network network(engine, run.shape);
    fsdp::AdamW adamw(engine);
    for (int step = 0; step < 2; ++step) {
      tally->entries.clear();
      tally->meetings = 0;
      Flags<fsdp::Engine<Counted>> flags(engine);
      for (int micro = 0; micro < run.micro_steps; ++micro) {
        before(flags, micro + 1 == run.micro_steps);
        auto const from = tally->entries.size();
        network.step(step);
        for (auto const kind : {fsdp::PassKind::forward, fsdp::PassKind::backward})
          if (!(count(engine.program(), kind, flags.step_flags()) ==
                toy::counts_of(*tally, from, std::string(name(kind)))))
            throw std::logic_error("the program of\n" + to_text(engine.program()) + "counts something else");
        flags.start = fsdp::flags_after(flags.step_flags());
      }
      auto const norm = fsdp::clip_grad_norm(engine, 1.0f);
      adamw.step(norm);
      if (tally->meetings != (ranks > 1 ? 1u : 0u))
        throw std::logic_error("ranks meet once before the updates of a step");
    }
    engine.synchronize();
    if (first) result = *tally;
  });
  return result;
}

toy::Tally one_step(fsdp::ShardingStrategy const& strategy, int ranks, toy::Run run) {
  return one_step(strategy, ranks, run, [&](auto& flags, bool last) { flags.no_sync(run.sync_last_only && !last); });
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
  check(one_step(fsdp::FullShard{}, ranks, run), {L, L - 2, L, 0});
  check(one_step(fsdp::ShardGradOp{}, ranks, run), {L, 0, L, 0});
  run.options.bucket_bytes = 4096;
  run.options.first_bucket_bytes = 1024;
  auto const ddp = one_step(fsdp::NoShard{}, ranks, run);
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
  check(one_step(fsdp::FullShard{}, ranks, run), {L, L - 1, L, 0});
  run.options.keep_root = false;
  check(one_step(fsdp::FullShard{}, ranks, run), {L + 1, L, L, 0});
  run.options.keep_last = true;
  check(one_step(fsdp::FullShard{}, ranks, run), {L + 1, L - 1, L, 0});
}

TEST_CASE("a hybrid group of two adds one all-reduce a unit") {
  toy::Run run;
  run.shard_group = 2;
  check(one_step(fsdp::HybridShard<fsdp::FullShard>{}, 4, run), {5, 3, 5, 5});
  check(one_step(fsdp::HybridShard<fsdp::ShardGradOp>{}, 4, run), {5, 0, 5, 5});
}

TEST_CASE("one rank communicates nothing") {
  toy::Run run;
  check(one_step(fsdp::FullShard{}, 1, run), {0, 0, 0, 0});
  check(one_step(fsdp::ShardGradOp{}, 1, run), {0, 0, 0, 0});
  check(one_step(fsdp::NoShard{}, 1, run), {0, 0, 0, 0});
}

TEST_CASE("micro-steps repeat the gathers, and reduce each time or once") {
  toy::Run run;
  run.micro_steps = 3;
  check(one_step(fsdp::FullShard{}, 2, run), {15, 9, 15, 0});
  run.sync_last_only = true;
  run.options.allow_no_sync = true;
  check(one_step(fsdp::FullShard{}, 2, run), {15, 9, 5, 0});
  check(one_step(fsdp::ShardGradOp{}, 2, run), {15, 0, 5, 0});
}

TEST_CASE("four units, three micro-steps: what is kept and what waits") {
  toy::Run run;  // four blocks, nothing held
  run.shape.tied = false;
  run.micro_steps = 3;
  run.shard_group = 2;
  run.options.keep_last = false;
  auto const last_reduces = [](auto& flags, bool last) { flags.no_sync(!last); };
  auto const last_replicates = [](auto& flags, bool last) { flags.no_replica_sync(!last); };
  auto const last_reshards = [](auto& flags, bool last) { flags.keep_unsharded(!last); };
  SECTION("reducing each time") {
    check(one_step(fsdp::FullShard{}, 4, run), {12, 12, 12, 0});
    check(one_step(fsdp::ShardGradOp{}, 4, run), {12, 0, 12, 0});
    check(one_step(fsdp::HybridShard<>{}, 4, run), {12, 12, 12, 12});
  }
  SECTION("reducing in the last alone") {
    run.options.allow_no_sync = true;
    check(one_step(fsdp::FullShard{}, 4, run, last_reduces), {12, 12, 4, 0});
    check(one_step(fsdp::ShardGradOp{}, 4, run, last_reduces), {12, 0, 4, 0});
    check(one_step(fsdp::HybridShard<>{}, 4, run, last_reduces), {12, 12, 4, 4});
    auto const ddp = one_step(fsdp::NoShard{}, 4, run, last_reduces);
    CHECK(ddp.count("all_reduce") * 3 == one_step(fsdp::NoShard{}, 4, run).count("all_reduce"));
  }
  SECTION("replicating in the last alone") {
    run.options.allow_no_replica_sync = true;
    check(one_step(fsdp::HybridShard<>{}, 4, run, last_replicates), {12, 12, 12, 4});
    check(one_step(fsdp::HybridShard<fsdp::ShardGradOp>{}, 4, run, last_replicates), {12, 0, 12, 4});
    run.options.allow_no_sync = true;
    auto const both = one_step(fsdp::HybridShard<>{}, 4, run, [&](auto& flags, bool last) {
      flags.no_sync(!last);
      flags.no_replica_sync(!last);
    });
    check(both, {12, 12, 4, 4});
  }
  SECTION("parameters stay between micro-steps") {
    check(one_step(fsdp::ShardGradOp{}, 4, run, last_reshards), {4, 0, 12, 0});
    run.options.allow_keep_unsharded = true;
    // Forward finds what backward left, and reshards it.
    check(one_step(fsdp::FullShard{}, 4, run, last_reshards), {4, 12, 12, 0});
    run.options.keep_last = true;
    check(one_step(fsdp::FullShard{}, 4, run, last_reshards), {4, 9, 12, 0});
  }
}

TEST_CASE("units that differ cost what their own strategies cost") {
  toy::Run run;  // a tied root and 4 blocks
  run.shape.strategies = {{}, fsdp::ShardGradOp{}, {}, fsdp::NoShard{}};
  run.options.bucket_bytes = run.options.first_bucket_bytes = 1 << 20;
  // Backward gathers the first block alone: the third is the last that would be dropped.
  check(one_step(fsdp::FullShard{}, 4, run), {4, 1, 4, 1});
  run.shape.root = fsdp::NoShard{};
  check(one_step(fsdp::FullShard{}, 4, run), {3, 1, 3, 1});
  run.options.bucket_bytes = run.options.first_bucket_bytes = 256;
  CHECK(one_step(fsdp::FullShard{}, 4, run).count("all_reduce") > 4);
  run.micro_steps = 3;
  run.options.allow_no_sync = run.sync_last_only = true;
  run.options.bucket_bytes = run.options.first_bucket_bytes = 1 << 20;
  check(one_step(fsdp::FullShard{}, 4, run), {9, 3, 3, 1});

  run = {};
  run.shard_group = 2;
  run.shape.strategies = {{}, fsdp::HybridShard<fsdp::ShardGradOp>{.group = 2}, {}, fsdp::NoShard{}};
  check(one_step(fsdp::HybridShard<>{}, 4, run), {4, 1, 4, 4 + 1});
  run.micro_steps = 3;
  run.options.allow_no_replica_sync = true;
  check(one_step(fsdp::HybridShard<>{}, 4, run, [](auto& flags, bool last) { flags.no_replica_sync(!last); }),
        {12, 3, 12, 4 + 1});
}

TEST_CASE("a smaller group gathers in backward, of larger slices") {
  toy::Run run;
  run.shape.hidden = {29, 7, 40};
  run.options.reshard_ranks = 2;
  auto const tally = one_step(fsdp::FullShard{}, 4, run);
  check(tally, {4, 2, 4, 0});  // the root is held, the last block kept
  std::size_t halves = 0;
  for (auto const& entry : tally.entries) {
    if (entry.operation != "all_gather") continue;
    INFO(entry.pass << " " << entry.unit);
    CHECK(entry.ranks == (entry.pass == "forward" ? 4 : 2));
    for (auto const& forward : tally.entries) {
      if (forward.operation != "all_gather" || forward.pass != "forward" || forward.unit != entry.unit) continue;
      CHECK(entry.count * static_cast<std::size_t>(entry.ranks) == forward.count * 4);
      halves += entry.pass == "backward";
    }
  }
  CHECK(halves == 2);
  run.options.keep_last = run.options.keep_root = false;
  check(one_step(fsdp::FullShard{}, 4, run), {5, 4, 4, 0});
}
