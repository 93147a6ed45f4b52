// SPDX-License-Identifier: Apache-2.0
// Reserved and live bytes, to the byte: against the closed formulas, the plan, and what the allocators were asked for.
// skip-sanitizers
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "tests/catch.hpp"
#include "tests/support/counting.hpp"
#include "tests/support/local_run.hpp"
#include "tests/support/shard_group.hpp"

namespace {

/// A host device that counts the bytes that it was asked for, over all its copies.
struct CountingDevice : fsdp::host::Device {
  std::shared_ptr<std::atomic<std::int64_t>> bytes = std::make_shared<std::atomic<std::int64_t>>(0);
  void* allocate(std::size_t size) const {
    bytes->fetch_add(static_cast<std::int64_t>(size), std::memory_order_relaxed);
    return fsdp::host::Device::allocate(size);
  }
  void deallocate(void* memory, std::size_t size) const noexcept {
    bytes->fetch_sub(static_cast<std::int64_t>(size), std::memory_order_relaxed);
    fsdp::host::Device::deallocate(memory, size);
  }
};
static_assert(fsdp::Device<CountingDevice>);

struct Measured {
  std::int64_t sealed_reserved, sealed_live;  // before an optimizer
  std::int64_t reserved, rest;
  std::int64_t forward, backward;  // highest live bytes of a pass
  std::int64_t reserved_later, live_later;
  std::int64_t P, S, U, B;  // bytes
  bool total_constant;
  fsdp::MemoryPlan plan;
};

Measured measure(fsdp::ShardingStrategy const& strategy, int ranks, toy::Run run, int more_steps = 3) {
  Measured m{};
  fsdp::local::run(ranks, fsdp::host::Device{}, [&](fsdp::local::Communicator<fsdp::host::Device> comm) {
    bool const first = comm.rank() == 0;
    using Comm = fsdp::local::Communicator<fsdp::host::Device>;
    fsdp::Mesh<Comm> mesh(std::move(comm));
    fsdp::Engine<Comm> engine(mesh, fsdp::testing::in_groups_of(run.shard_group, strategy), run.options);
    toy::Network network(engine, run.shape);
    Measured mine{};
    auto& account = engine.account();
    engine.seal();
    mine.sealed_reserved = account.reserved_state();
    mine.sealed_live = account.live_state();
    auto const steps = [&](auto& adamw, int count) {
      for (int step = 0; step < count; ++step) {
        for (int micro = 0; micro < run.micro_steps; ++micro) {
          auto const waits = engine.no_sync(run.sync_last_only && micro + 1 < run.micro_steps);
          network.step(step);
        }
        auto const norm = fsdp::clip_grad_norm(engine, 1.0f);
        adamw.step(norm);
      }
    };
    {
      fsdp::AdamW adamw(engine);
      mine.rest = account.live_state();
      steps(adamw, 2);
      mine.reserved = account.reserved_state();
      auto const total = account.reserved_total();
      account.reset_peak();
      network.forward(0);
      mine.forward = account.peak_live_state();
      account.reset_peak();
      network.backward();
      mine.backward = account.peak_live_state();
      adamw.step();
      steps(adamw, more_steps);
      mine.reserved_later = account.reserved_state();
      mine.live_later = account.live_state();
      mine.total_constant = account.reserved_total() == total;
    }
    for (std::size_t u = 0; u < engine.shards().size(); ++u) {
      auto const bytes = engine.shards()[u].full_numel() * 4;
      mine.P += bytes;
      mine.S += engine.shards()[u].shard_numel() * 4;
      (engine.shards()[u].name() == "root" ? mine.B : mine.U) = bytes;
    }
    mine.plan = fsdp::memory_plan(engine.plan_input());
    if (first) m = mine;
  });
  return m;
}

void check(Measured const& m, std::int64_t reserved, std::int64_t forward, std::int64_t backward) {
  CHECK(m.total_constant);
  CHECK(m.sealed_live == m.S);
  CHECK(m.rest == 4 * m.S);
  CHECK(m.reserved == reserved);
  CHECK(m.reserved_later == reserved);
  CHECK(m.live_later == 4 * m.S);
  CHECK(m.forward == forward);
  CHECK(m.backward == backward);
  CHECK(m.plan.reserved() == reserved);
  CHECK(m.plan.rest() == 4 * m.S);
  CHECK(m.plan.live_forward == forward);
  CHECK(m.plan.live_backward == backward);
}

}  // namespace

TEST_CASE("FullShard reserves 4S + (p + q)U + 2B and uses no more") {
  int const ranks = GENERATE(2, 4);
  auto const prefetch = GENERATE(0, 1, 2);
  toy::Run run;
  run.shape.hidden = {29, 29, 29, 29, 29};
  run.options.prefetch = prefetch;
  auto const m = measure(fsdp::FullShard{}, ranks, run);
  auto const p = prefetch + 1, q = 2;
  check(m, 4 * m.S + (p + q) * m.U + 2 * m.B, 4 * m.S + p * m.U + m.B, 4 * m.S + (p + q) * m.U + 2 * m.B);
}

TEST_CASE("FullShard with few blocks peaks lower") {
  toy::Run run;
  run.shape.hidden = {29, 29};
  auto const two = measure(fsdp::FullShard{}, 2, run);
  check(two, 4 * two.S + 4 * two.U + 2 * two.B, 4 * two.S + 2 * two.U + two.B, 4 * two.S + 3 * two.U + 2 * two.B);
  run.shape.hidden = {29};
  auto const one = measure(fsdp::FullShard{}, 2, run);
  check(one, 4 * one.S + 2 * one.U + 2 * one.B, 4 * one.S + one.U + one.B, 4 * one.S + 2 * one.U + 2 * one.B);
}

TEST_CASE("ShardGradOp reserves 4S + P + 2U + B") {
  toy::Run run;
  int const ranks = GENERATE(2, 4);
  auto const m = measure(fsdp::ShardGradOp{}, ranks, run);
  check(m, 4 * m.S + m.P + 2 * m.U + m.B, 4 * m.S + m.P, 4 * m.S + m.P + m.U + m.B);
}

TEST_CASE("HybridShard reserves as its inner strategy does within the group") {
  toy::Run run;
  run.shard_group = 2;
  auto const m = measure(fsdp::HybridShard<fsdp::FullShard>{}, 4, run);
  CHECK(m.S * 2 == m.P);
  check(m, 4 * m.S + 4 * m.U + 2 * m.B, 4 * m.S + 2 * m.U + m.B, 4 * m.S + 4 * m.U + 2 * m.B);
  auto const g = measure(fsdp::HybridShard<fsdp::ShardGradOp>{}, 4, run);
  check(g, 4 * g.S + g.P + 2 * g.U + g.B, 4 * g.S + g.P, 4 * g.S + g.P + g.U + g.B);
}

TEST_CASE("NoShard, and any strategy on one rank, reserve 4P") {
  toy::Run run;
  auto const ddp = measure(fsdp::NoShard{}, 2, run);
  CHECK(ddp.S == ddp.P);
  check(ddp, 4 * ddp.P, 4 * ddp.P, 4 * ddp.P);
  auto const one = measure(fsdp::FullShard{}, 1, run);
  check(one, 4 * one.P, 4 * one.P, 4 * one.P);
}

TEST_CASE("micro-steps without reduction take P of gradients") {
  toy::Run run;
  run.micro_steps = 3;
  run.sync_last_only = true;
  run.options.allow_no_sync = true;
  auto const full = measure(fsdp::FullShard{}, 2, run);
  CHECK(full.reserved == 4 * full.S + 2 * full.U + full.B + full.P);
  CHECK(full.reserved_later == full.reserved);
  CHECK(full.plan.reserved() == full.reserved);
  auto const op = measure(fsdp::ShardGradOp{}, 2, run);
  CHECK(op.reserved == 4 * op.S + 2 * op.P);
  CHECK(op.plan.reserved() == op.reserved);
}

TEST_CASE("reserved bytes after 1,000 steps equal those after 2") {
  toy::Run run;
  run.shape.hidden = {5, 5, 5};
  run.shape.width = 4;
  run.shape.inputs = 3;
  run.shape.global_rows = 4;
  auto const m = measure(fsdp::FullShard{}, 2, run, 1000);
  CHECK(m.reserved_later == m.reserved);
  CHECK(m.live_later == 4 * m.S);
}

TEST_CASE("the account says what the allocators were asked for, and all of it returns") {
  CountingDevice const device;
  fsdp::local::run(2, device, [&](fsdp::local::Communicator<CountingDevice> inner) {
    using Comm = toy::Counting<fsdp::local::Communicator<CountingDevice>>;
    auto tally = std::make_shared<toy::Tally>();
    Comm comm(std::move(inner), tally);
    comm.exchange({}, "start");
    {
      fsdp::Mesh<Comm> mesh(std::move(comm));
      fsdp::Engine<Comm> engine(mesh, fsdp::FullShard{});
      toy::Network network(engine, {});
      fsdp::AdamW adamw(engine);
      network.step(0);
      adamw.step();
      engine.synchronize();
      auto const mine = engine.account().reserved_total();
      std::int64_t both = 0;
      for (auto const& text : mesh.world().exchange(std::to_string(mine), "bytes")) both += std::stoll(text);
      if (mesh.rank() == 0)
        CHECK(device.bytes->load() == both);  // communicator allocations come from the device as well
      mesh.world().exchange({}, "measured");
    }
    if (tally->allocated != tally->deallocated) throw fsdp::Error("a communicator's memory did not return");
  });
  CHECK(device.bytes->load() == 0);
}
