// SPDX-License-Identifier: Apache-2.0
// Engines whose units differ in strategy: equal to the bit to uniform ones, with clipping, in all that they export.
//
// skip-sanitizers
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "tests/catch.hpp"
#include "tests/support/local_run.hpp"

namespace {

using Strategies = std::vector<std::optional<fsdp::ShardingStrategy>>;

bool equal_bits(std::vector<float> const& a, std::vector<float> const& b) {
  return !a.empty() && a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

/// A root, first and last, and four blocks of unequal sizes.
toy::Run plain_run() {
  toy::Run run;
  run.shard_group = 2;
  run.shape.hidden = {29, 17, 31, 5};
  run.options.bucket_bytes = 3000;  // smaller than some units
  run.options.first_bucket_bytes = 700;
  return run;
}

/// Exports of an engine after a run: master weights, and the reduced gradients of one more backward pass.
struct Exported {
  std::vector<float> weights, gradients;
  double norm = 0.0;
};

template <class P>
Exported train(fsdp::ShardingStrategy const& strategy, int ranks, toy::Run const& run) {
  Exported exported;
  fsdp::local::run(ranks, fsdp::host::Device{}, [&](fsdp::local::Communicator<fsdp::host::Device> comm) {
    bool const first = comm.rank() == 0;
    fsdp::Mesh mesh(std::move(comm));
    fsdp::Engine engine(mesh, fsdp::testing::in_groups_of(run.shard_group, strategy), P{}, run.options);
    toy::Network network(engine, run.shape);
    fsdp::AdamW adamw(engine, {.lr = 1e-2f, .weight_decay = 0.1f});
    auto const passes = [&](std::int64_t step) {
      for (int micro = 0; micro < run.micro_steps; ++micro) {
        bool const last = micro + 1 == run.micro_steps;
        auto const waits = engine.no_sync(run.sync_last_only && !last);
        network.step(step * run.micro_steps + micro, 1.0f / static_cast<float>(run.micro_steps));
      }
    };
    for (int step = 0; step < run.steps; ++step) {
      passes(step);
      auto const norm = fsdp::clip_grad_norm(engine, 0.05f);
      adamw.step(norm);
    }
    passes(run.steps);
    auto const norm = fsdp::clip_grad_norm(engine, 0.05f).value();
    std::vector<float> gradients;
    fsdp::export_gradients(engine, [&](fsdp::TensorInfo const&, std::span<float const> values) {
      gradients.insert(gradients.end(), values.begin(), values.end());
    });
    auto weights = toy::parameters(engine);
    if (first) exported = {std::move(weights), std::move(gradients), norm};
  });
  return exported;
}

template <class P = fsdp::Fp32>
void check(fsdp::ShardingStrategy const& strategy, Strategies const& blocks, std::optional<fsdp::ShardingStrategy> root,
           int ranks, toy::Run run) {
  auto const uniform = train<P>(strategy, ranks, run);
  run.shape.strategies = blocks;
  run.shape.root = root;
  auto const mixed = train<P>(strategy, ranks, run);
  CHECK(equal_bits(mixed.weights, uniform.weights));
  CHECK(equal_bits(mixed.gradients, uniform.gradients));
  CHECK(mixed.norm == uniform.norm);
  CHECK(uniform.norm > 0.05);  // clipping does something
}

constexpr fsdp::HybridShard<> hybrid{.group = 2};
constexpr fsdp::HybridShard<fsdp::ShardGradOp> hybrid_grad_op{.group = 2};

}  // namespace

TEST_CASE("mixed: a replicated block, one that stays, a replicated root", "[mixed]") {
  Strategies const blocks{{}, fsdp::ShardGradOp{}, {}, fsdp::NoShard{}};
  for (int const ranks : {2, 3, 4}) {
    for (bool const last_only : {false, true}) {
      auto run = plain_run();
      run.micro_steps = last_only ? 3 : 1;
      run.sync_last_only = run.options.allow_no_sync = last_only;
      INFO(ranks << " ranks, " << run.micro_steps << " micro-steps");
      check(fsdp::FullShard{}, blocks, {}, ranks, run);
      check(fsdp::FullShard{}, blocks, fsdp::NoShard{}, ranks, run);
    }
  }
}

TEST_CASE("mixed: every unit replicated in an engine that shards", "[mixed]") {
  auto const run = plain_run();
  check(fsdp::FullShard{}, Strategies(4, fsdp::NoShard{}), fsdp::NoShard{}, 3, run);
}

TEST_CASE("mixed: with gradients that travel in bf16", "[mixed]") {
  Strategies const blocks{{}, fsdp::ShardGradOp{}, {}, fsdp::NoShard{}};
  for (bool const last_only : {false, true}) {
    auto run = plain_run();
    run.options.reduce_dtype = fsdp::DType::bf16;
    run.micro_steps = last_only ? 3 : 1;
    run.sync_last_only = run.options.allow_no_sync = last_only;
    check(fsdp::FullShard{}, blocks, {}, 3, run);
    check(fsdp::FullShard{}, blocks, fsdp::NoShard{}, 4, run);
  }
}

TEST_CASE("mixed: inside HybridShard", "[mixed]") {
  for (auto const& strategy : {fsdp::ShardingStrategy(hybrid), fsdp::ShardingStrategy(hybrid_grad_op)}) {
    for (bool const partial : {false, true}) {
      auto run = plain_run();
      run.options.allow_no_replica_sync = partial;
      INFO(strategy.name << ", partial shards " << partial);
      check(strategy, {hybrid, hybrid_grad_op, {}, fsdp::NoShard{}}, {}, 4, run);
      check(strategy, {{}, fsdp::NoShard{}, hybrid_grad_op, {}}, fsdp::NoShard{}, 4, run);
    }
  }
}

TEST_CASE("mixed: in bf16 with fp32 reduction", "[mixed]") {
  auto run = plain_run();
  run.steps = 10;
  check<fsdp::Bf16>(fsdp::FullShard{}, {{}, fsdp::ShardGradOp{}, {}, fsdp::NoShard{}}, {}, 4, run);
  check<fsdp::Bf16>(hybrid, {{}, hybrid_grad_op, {}, fsdp::NoShard{}}, fsdp::NoShard{}, 4, run);
}

namespace {
/// A replica whose copy of the parameters is dropped after forward, and made again for backward.
struct Recast {
  static constexpr std::string_view name = "recast";
  static constexpr bool shards = false;
  static constexpr bool reshards_after_forward = true;
};
}  // namespace

TEST_CASE("mixed: a strategy of the user's own", "[mixed]") {
  auto run = plain_run();
  run.steps = 10;
  check<fsdp::Bf16>(fsdp::FullShard{}, {Recast{}, {}, Recast{}, fsdp::NoShard{}}, {}, 4, run);
  check<fsdp::Bf16>(fsdp::NoShard{}, Strategies(4, Recast{}), {}, 2, run);
}

TEST_CASE("mixed: units shard over the ranks of their engine, or not at all", "[mixed]") {
  auto const refused = [](fsdp::ShardingStrategy const& strategy, fsdp::ShardingStrategy const& unit) {
    std::string message;
    try {
      fsdp::local::run(2, fsdp::host::Device{}, [&](fsdp::local::Communicator<fsdp::host::Device> comm) {
        fsdp::Mesh mesh(std::move(comm));
        fsdp::Engine engine(mesh, strategy);
        engine.add_unit("head", unit);
      });
    } catch (fsdp::ConfigError const& error) {
      message = error.what();
    }
    return message.empty() ? message : message.substr(message.find(':') + 2);
  };
  CHECK(refused(hybrid, fsdp::FullShard{}) ==
        "unit 'head' has strategy full_shard, and its engine hybrid_shard(full_shard) with groups of 2: a unit must "
        "shard over the same ranks as its engine, or not at all");
  CHECK(refused(fsdp::HybridShard<>{.group = 1}, hybrid)
            .starts_with("unit 'head' has strategy hybrid_shard(full_shard) with"));
  CHECK(refused(fsdp::FullShard{}, hybrid)
            .starts_with("unit 'head' has strategy hybrid_shard(full_shard) with groups of 2"));
  CHECK(refused(fsdp::NoShard{}, fsdp::FullShard{})
            .starts_with("unit 'head' has strategy full_shard, and its engine no_shard"));
  CHECK(refused(hybrid, fsdp::NoShard{}).empty());
}
