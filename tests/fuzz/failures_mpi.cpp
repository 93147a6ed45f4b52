// SPDX-License-Identifier: Apache-2.0
// ranks: 3
// full-ranks: 2
// links: fsdp_test_trial
// skip-sanitizers
// Over processes of one node and of pretended ones: what all ranks catch, or what is refused, is forgotten, and
// training goes on as in the reference.
#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <utility>

#include "fsdp/mpi.hpp"
#include "tests/fuzz/draw_scenario.hpp"
#include "tests/fuzz/rank.hpp"
#include "tests/support/trial/compare.hpp"

namespace {

using Comm = fsdp::mpi::Communicator;

/// Initial values depend on names and the seed alone: one thread makes them too.
trial::Tensors<float> initial_values(trial::Trial alone) {
  alone.ranks = 1;
  alone.script.clear();
  return trial::run_setting(alone, {})[0].parameters;
}

/// Two strategies (groups of one rank reduce as NoShard does), and no second engine after a failure.
bool takes_part(fuzz::Scenario const& scenario) {
  auto const& plan = scenario.ranks[0];
  auto const sharding = plan.setting.sharding;
  return scenario.ending == fuzz::Ending::reference && plan.afresh.empty() &&
         (sharding == trial::Sharding::full || sharding == trial::Sharding::hybrid_grad_op);
}

/// Errors in this rank's values; empty: none.
std::string run(fsdp::mpi::Environment const& environment, fuzz::Scenario const& scenario, int ranks_per_node) {
  fsdp::mpi::Options options;
  options.ranks_per_node = ranks_per_node;
  Comm world(environment, {}, options);
  auto const rank = world.rank();
  auto const& plan = scenario.ranks[static_cast<std::size_t>(rank)];
  auto const trainer = std::make_unique<trial::EngineTrainer<Comm>>(std::move(world), plan.trial, plan.setting);
  fuzz::Rank(rank, plan, *trainer).run(plan.calls);
  return far_from(reference_of(plan, initial_values(plan.trial)), rank, trainer->outcome());
}

}  // namespace

int main(int argc, char** argv) {
  return fsdp::mpi::run(argc, argv, [](fsdp::mpi::Environment& environment) {
    int ran = 0, failed = 0;
    for (std::uint64_t seed = 0; ran < 30; ++seed) {
      auto const scenario = fuzz::draw_scenario(seed, environment.size());
      if (!takes_part(scenario)) continue;
      auto const difference = run(environment, scenario, ran++ % 3 == 0 ? 1 : 0);
      if (difference.empty()) continue;
      ++failed;
      fmt::print("seed {} '{}', rank {}: {}\n", seed, scenario.name, environment.rank(), difference);
    }
    return failed;
  });
}
