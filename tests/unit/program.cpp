// SPDX-License-Identifier: Apache-2.0
// skip-tsan
// The program of a step: its text, its memory against a walk that knows no programs, and that its slots are never in
// two hands.
#include "fsdp/engine/program.hpp"

#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "fsdp/engine/memory_plan.hpp"
#include "tests/catch.hpp"
#include "tests/support/step_walk.hpp"

namespace {

using fsdp::Action;
using fsdp::Phase;

/// Three blocks between an embedding and a head that is tied to it.
fsdp::MemoryPlanInput tied_root() {
  fsdp::MemoryPlanInput input;
  input.units = {{640, "root"}, {1536, "h.0"}, {1536, "h.1"}, {1536, "h.2"}};
  input.uses = {0, 1, 2, 3, 0};
  input.modules = {"root", "h.0", "h.1", "h.2", "root"};
  input.shards = 4;
  return input;
}

/// The lines of the passes that train.
std::string training(fsdp::MemoryPlanInput const& input) {
  auto const text = to_text(fsdp::compile_program(input), fsdp::plain_step);
  return text.substr(0, text.find("evaluation"));
}

}  // namespace

TEST_CASE("program: FullShard with a tied root") {
  CHECK(training(tied_root()) ==
        "forward    root | gather root->own, gather h.0->A, await root |\n"
        "forward    h.0  | gather h.1->B, await h.0 | drop h.0->A\n"
        "forward    h.1  | gather h.2->A, await h.1 | drop h.1->B\n"
        "forward    h.2  | await h.2 |\n"
        "forward    root | |\n"
        "backward   root | lease root->own |\n"
        "backward   h.2  | gather h.1->B, lease h.2->x | drop h.2->A, reduce h.2\n"
        "backward   h.1  | gather h.0->A, await h.1, lease h.1->y | drop h.1->B, reduce h.1\n"
        "backward   h.0  | await h.0, lease h.0->x | drop h.0->A, reduce h.0\n"
        "backward   root | | drop root->own, reduce root\n");
}

TEST_CASE("program: what depends on the micro-step is said") {
  auto input = tied_root();
  for (auto& unit : input.units) unit.reshards_after_forward = false;
  input.no_sync = true;
  input.reduce_is_master = false;
  input.reduce_bytes = 2;
  input.uses = {0, 1};
  input.units.resize(2);
  input.modules = {"wte", "h"};
  CHECK(to_text(fsdp::compile_program(input)) ==
        "forward    wte | gather root->own if sharded at first, gather h.0->own if sharded at first, "
        "await root if sharded at first |\n"
        "forward    h   | await h.0 if sharded at first |\n"
        "backward   h   | lease h.0->x | drop h.0->own if dropping, hold h.0 if no sync, "
        "add held h.0 if group sync or sync and gradients wait, reduce h.0 if group sync or sync\n"
        "backward   wte | lease root->y | drop root->own if dropping, hold root if no sync, "
        "add held root if group sync or sync and gradients wait, reduce root if group sync or sync\n"
        "evaluation wte | gather root->own, gather h.0->own, await root | drop root->own\n"
        "evaluation h   | await h.0 | drop h.0->own\n");
}

TEST_CASE("program: kept slices, replicas that wait, and nothing to move") {
  auto input = tied_root();
  input.reshard_ranks = 2;
  input.prefetch = fsdp::prefetch_by_depth(5, 0, 0);
  input.replicas = 2;
  input.no_replica_sync = true;
  CHECK(training(input) ==
        "forward    root | gather root->own, await root |\n"
        "forward    h.0  | gather h.0->A, await h.0 | keep slice h.0, drop h.0->A\n"
        "forward    h.1  | gather h.1->A, await h.1 | keep slice h.1, drop h.1->A\n"
        "forward    h.2  | gather h.2->A, await h.2 |\n"
        "forward    root | |\n"
        "backward   root | lease root->own |\n"
        "backward   h.2  | lease h.2->x | drop h.2->A, reduce h.2\n"
        "backward   h.1  | gather slices h.1->A, await h.1, lease h.1->y | drop h.1->A, drop slice h.1, reduce h.1\n"
        "backward   h.0  | gather slices h.0->A, await h.0, lease h.0->x | drop h.0->A, drop slice h.0, reduce h.0\n"
        "backward   root | | drop root->own, reduce root\n");
  auto const all = to_text(fsdp::compile_program(input));
  CHECK(all.find("reduce group h.1 if group sync, reduce h.1 if sync\n") != std::string::npos);
}

TEST_CASE("program: buckets of gradients that backward writes where optimizers read") {
  auto input = tied_root();
  input.shards = 1;
  input.replicas = 4;
  for (auto& unit : input.units) unit = {unit.elements, unit.name, false, false};
  input.bucket_bytes = 8192;
  input.first_bucket_bytes = 256;
  CHECK(training(input) ==
        "forward    root | |\n"
        "forward    h.0  | |\n"
        "forward    h.1  | |\n"
        "forward    h.2  | |\n"
        "forward    root | |\n"
        "backward   root | lease root |\n"
        "backward   h.2  | lease h.2 | end h.2, await gradients h.2, all-reduce h.2 bucket 0\n"
        "backward   h.1  | lease h.1 | end h.1, await gradients h.1, all-reduce h.1 bucket 1, complete h.2\n"
        "backward   h.0  | lease h.0 | end h.0, await gradients h.0, all-reduce h.0 bucket 2, complete h.1\n"
        "backward   root | | end root, await gradients root, all-reduce root bucket 3, complete h.0, complete root\n");
}

TEST_CASE("program: memory is what a walk through the step counts, and slots pass from hand to hand") {
  std::mt19937 random(7);
  auto const below = [&](unsigned n) { return static_cast<int>(random() % n); };
  for (int trial = 0; trial < 6000; ++trial) {
    fsdp::MemoryPlanInput input;
    auto const units = 1 + below(6);
    bool const mixed = below(2) == 0, reshards = below(3) > 0;
    for (int unit = 0; unit < units; ++unit) {
      bool const shards = !mixed || below(3) > 0;
      input.units.push_back({256 * (1 + below(9)), {}, shards, mixed ? shards && below(3) > 0 : reshards});
    }
    for (int unit = 0; unit < units; ++unit) input.uses.push_back(static_cast<std::size_t>(unit));
    for (int more = below(3); more > 0; --more)
      input.uses.insert(input.uses.begin() + below(static_cast<unsigned>(input.uses.size())),
                        static_cast<std::size_t>(below(static_cast<unsigned>(units))));
    input.shards = 1 << below(3);
    input.replicas = 1 << below(2);
    input.keep_last = below(3) > 0;
    input.keep_root = below(3) > 0;
    input.no_replica_sync = below(3) == 0;
    input.prefetch = fsdp::prefetch_by_depth(input.uses.size(), below(4), below(4));
    if (below(3) == 0) input.max_ahead_bytes = 1024 * (1 + below(12));
    input.keep_unsharded = below(4) == 0;
    if (input.shards == 4 && !input.keep_unsharded && below(3) == 0) input.reshard_ranks = 2;
    input.no_sync = below(3) == 0;
    input.param_is_master = below(2) == 0;
    if (!input.param_is_master) input.param_bytes = 2;
    input.reduce_is_master = below(2) == 0;
    if (!input.reduce_is_master) input.reduce_bytes = 2;
    auto const program = fsdp::compile_program(input);
    auto const plan = fsdp::memory_plan(program, input);
    auto const walked = fsdp::testing::walked_memory_plan(input);
    CAPTURE(trial, to_text(program));
    REQUIRE(plan.reserved() == walked.reserved());
    REQUIRE(plan.live_forward == walked.live_forward);
    REQUIRE(plan.live_backward == walked.live_backward);
    REQUIRE(plan.live_accumulated == walked.live_accumulated);

    for (bool const evaluating : {false, true}) {
      std::map<std::uint32_t, std::uint32_t> holder;  // of gather slots
      std::set<std::uint32_t> ready;
      for (auto const phase : {evaluating ? Phase::evaluation : Phase::forward, Phase::backward}) {
        if (evaluating && phase == Phase::backward) break;
        for (auto const& turn : program.turns(phase)) {
          for (auto const* operations : {&turn.before, &turn.after}) {
            if (operations == &turn.after && !program.units[turn.unit].reads_masters)
              REQUIRE(ready.count(turn.unit) == 1);
            for (auto const& operation : *operations) {
              if (!operation.runs(fsdp::plain_step)) continue;
              if (operation.action == Action::gather || operation.action == Action::gather_slices)
                REQUIRE(holder.emplace(operation.slot, operation.unit).second);
              if (operation.action == Action::await) REQUIRE(ready.insert(operation.unit).second);
              if (operation.action != Action::drop) continue;
              REQUIRE(holder.at(operation.slot) == operation.unit);
              holder.erase(operation.slot);
              REQUIRE(ready.erase(operation.unit) == 1);
            }
          }
        }
      }
      REQUIRE(holder.empty());
    }
  }
}
