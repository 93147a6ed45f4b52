// SPDX-License-Identifier: Apache-2.0
// ranks: 3 4
// full-ranks: 1 2
// skip-sanitizers
// Muon, AdamW with groups and averages of weights over processes have the bits that they have over threads.
#include <utility>
#include <vector>

#include "fsdp/ema.hpp"
#include "fsdp/mpi.hpp"
#include "fsdp/muon.hpp"
#include "tests/catch.hpp"
#include "tests/mpi_main.hpp"
#include "tests/support/gradient_units.hpp"

namespace {

using Values = std::vector<float>;

/// Four steps, the last two clipped. @return weights and averages, on rank 0
template <class E>
std::pair<Values, Values> train(E& engine) {
  toy::Patches<E> patches(engine);
  fsdp::Muon muon{engine, fsdp::matching("*.0.*", "*.1.*"), {.weight_decay = 0.1f}};
  fsdp::AdamW adamw{engine, muon.rest(), {}, {{.tensors = "*.bias", .lr_scale = 2.0f}}};
  fsdp::Optimizers both{muon, adamw};
  fsdp::Ema ema{engine, 0.75f};
  for (int step = 0; step < 4; ++step) {
    patches.step({.step = step});
    both.step({0.05f, 0.01f}, fsdp::clip_grad_norm(engine, step < 2 ? 1e9f : 0.5f));
    ema.update();
  }
  auto weights = toy::all_parameters(engine);
  auto const on = ema.swap();
  return {std::move(weights), toy::all_parameters(engine)};
}

template <class Comm>
std::pair<Values, Values> train_over(Comm world, fsdp::ShardingStrategy const& strategy) {
  fsdp::Mesh mesh(std::move(world));
  fsdp::Engine engine(mesh, strategy);
  auto result = train(engine);
  engine.synchronize();
  return result;
}

bool equals_threads(fsdp::ShardingStrategy const& strategy, int ranks_per_node = 0) {
  fsdp::mpi::Options options;
  options.ranks_per_node = ranks_per_node;
  fsdp::mpi::Communicator world(test_environment(), {}, options);
  int const rank = world.rank(), ranks = world.size();
  auto const processes = train_over(std::move(world), strategy);
  if (rank != 0) return true;
  std::pair<Values, Values> threads;
  fsdp::local::run(ranks, fsdp::host::Device{}, [&](toy::LocalHost comm) {
    bool const first = comm.rank() == 0;
    auto mine = train_over(std::move(comm), strategy);
    if (first) threads = std::move(mine);
  });
  return !threads.first.empty() && processes == threads;
}

}  // namespace

TEST_CASE("Muon, groups and averages over processes equal those over threads, bitwise") {
  int const ranks = test_environment().size();
  CHECK(equals_threads(fsdp::FullShard{}));
  CHECK(equals_threads(fsdp::NoShard{}));
  CHECK(equals_threads(fsdp::HybridShard<>{.group = ranks == 4 ? 2 : ranks}));
  CHECK(equals_threads(fsdp::FullShard{}, 2));
}
