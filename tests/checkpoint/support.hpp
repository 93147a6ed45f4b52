// SPDX-License-Identifier: Apache-2.0
// Runs whose state can be looked at: what the tests of checkpoints share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/fsdp.hpp"
#include "fsdp/full_state.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"
#include "tests/support/toy_model.hpp"

namespace fsdp::testing {

using Comm = local::Communicator<host::Device>;

/// Every array of every tensor, and the optimizer's steps.
struct State {
  std::map<std::string, std::vector<float>> arrays;
  std::int64_t steps = 0;

  friend bool operator==(State const&, State const&) = default;
};

/// @note Collective: yes. Rank 0 has the arrays.
template <class E, class O>
State state_of(E& engine, O& optimizer) {
  State state;
  auto const keep = [&](std::string const& array) {
    return [&state, array](TensorInfo const& tensor, std::span<float const> values) {
      state.arrays[array + " of " + tensor.name] = {values.begin(), values.end()};
    };
  };
  export_full(engine, keep("parameters"));
  auto const names = optimizer.state_names();
  for (std::size_t i = 0; i < names.size(); ++i) {
    std::size_t unit = 0;  // units are exported in order, each in several pieces
    export_shards(
        engine,
        [&](auto& each) {
          while (&engine.shards()[unit] != &each) ++unit;
          return optimizer.state(i, unit);
        },
        keep(std::string(names[i])));
  }
  state.steps = optimizer.steps();
  return state;
}

/// The smallest model, with tensors in two units.
inline toy::Shape tiny() {
  toy::Shape shape;
  shape.inputs = 3;
  shape.width = 2;
  shape.hidden = {3};
  return shape;
}
inline constexpr auto make_adamw = [](auto& engine) {
  return std::make_unique<AdamW<std::remove_reference_t<decltype(engine)>>>(
      engine, AdamWOptions{.lr = 1e-2f, .weight_decay = 0.1f});
};

/// A run: the toy network on `ranks` threads.
struct Trial {
  int ranks = 1;
  ShardingStrategy strategy = FullShard{};
  toy::Shape shape{};
};
inline toy::Shape shape_for_any_world() {
  toy::Shape shape;
  shape.global_rows = 60;  // of 1 to 6 ranks
  return shape;
}

template <class E, class O>
void train(toy::Network<E>& network, O& optimizer, std::int64_t first, std::int64_t last) {
  for (auto step = first; step < last; ++step) {
    network.step(step, 1.0f);
    optimizer.step(1e-2f);
  }
}

/// Calls `body(engine, network, optimizer)` on every rank. Catch2 is for one thread: rank 0 alone may assert.
template <class P, class MakeOptimizer, class Body>
void run(Trial const& trial, MakeOptimizer&& make, Body&& body) {
  local::run(trial.ranks, host::Device{}, [&](Comm comm) {
    Mesh<Comm> mesh(std::move(comm));
    Engine<Comm, P> engine(mesh, trial.strategy);
    toy::Network network(engine, trial.shape);
    auto optimizer = make(engine);
    body(engine, network, *optimizer);
  });
}

}  // namespace fsdp::testing
