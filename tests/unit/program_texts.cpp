// SPDX-License-Identifier: Apache-2.0
// skip-tsan
// Programs of a dozen declarations, word for word as they are printed.
#include <cstddef>
#include <string>

#include "fsdp/step/memory_plan.hpp"
#include "fsdp/step/program.hpp"
#include "tests/catch.hpp"
#include "tests/support/step_walk.hpp"

namespace {

/// Three blocks between an embedding and a head that is tied to it.
fsdp::MemoryPlanInput tied_root() {
  fsdp::MemoryPlanInput input;
  input.units = {{640, "root"}, {1536, "h.0"}, {1536, "h.1"}, {1536, "h.2"}};
  input.uses = {0, 1, 2, 3, 0};
  input.modules = {"root", "h.0", "h.1", "h.2", "root"};
  input.shards = 4;
  return input;
}

/// An embedding, a block and a head.
fsdp::MemoryPlanInput three_units() {
  fsdp::MemoryPlanInput input;
  input.units = {{640, "wte"}, {1536, "h"}, {896, "head"}};
  input.uses = {0, 1, 2};
  input.modules = {"wte", "h", "head"};
  input.shards = 4;
  return input;
}

/// A root and four blocks, which gather ahead as `depth` says.
fsdp::MemoryPlanInput four_blocks(int depth) {
  fsdp::MemoryPlanInput input;
  input.units = {{640, "root"}, {1536, "h.0"}, {1536, "h.1"}, {1536, "h.2"}, {1536, "h.3"}};
  input.uses = {0, 1, 2, 3, 4};
  input.modules = {"root", "h.0", "h.1", "h.2", "h.3"};
  input.shards = 4;
  input.prefetch = fsdp::prefetch_by_depth(fsdp::testing::schedule_of(input), depth, depth);
  return input;
}

/// A root that is used first and last, and four blocks between, two to a unit.
fsdp::MemoryPlanInput blocks_in_pairs() {
  fsdp::MemoryPlanInput input;
  input.units = {{640, "root"}, {3072, "h.0-1"}, {3072, "h.2-3"}};
  input.uses = {0, 1, 1, 2, 2, 0};
  input.modules = {"wte", "h.0", "h.1", "h.2", "h.3", "head"};
  input.shards = 4;
  return input;
}

void never_reshard(fsdp::StepUnit& unit) { unit.reshards_after_forward = false; }
void never_shard(fsdp::StepUnit& unit) { unit.shards = unit.reshards_after_forward = false; }

/// The lines of the passes that train.
std::string training(fsdp::MemoryPlanInput const& input, fsdp::Facts facts = fsdp::plain_step) {
  auto const text = to_text(fsdp::compile_program(input), facts);
  return text.substr(0, text.find("evaluation"));
}

}  // namespace

TEST_CASE("program text: FullShard with a tied root") {
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

TEST_CASE("program text: what depends on the micro-step is said") {
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

TEST_CASE("program text: kept slices, replicas that wait, and nothing to move") {
  auto input = tied_root();
  input.reshard_ranks = 2;
  input.prefetch = fsdp::prefetch_by_depth(fsdp::testing::schedule_of(input), 0, 0);
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

TEST_CASE("program text: buckets of gradients that backward writes where optimizers read") {
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

TEST_CASE("program text: FullShard, and its evaluation") {
  CHECK(to_text(fsdp::compile_program(three_units()), fsdp::plain_step) ==
        "forward    wte  | gather wte->A, gather h->B, await wte | drop wte->A\n"
        "forward    h    | gather head->A, await h | drop h->B\n"
        "forward    head | await head |\n"
        "backward   head | gather h->B, lease head->x | drop head->A, reduce head\n"
        "backward   h    | gather wte->A, await h, lease h->y | drop h->B, reduce h\n"
        "backward   wte  | await wte, lease wte->x | drop wte->A, reduce wte\n"
        "evaluation wte  | gather wte->A, gather h->B, await wte | drop wte->A\n"
        "evaluation h    | gather head->A, await h | drop h->B\n"
        "evaluation head | await head | drop head->A\n");
}

TEST_CASE("program text: HybridShard moves the same, within its groups and then over them") {
  auto input = three_units();
  input.shards = input.replicas = 2;
  CHECK(to_text(fsdp::compile_program(input)) == to_text(fsdp::compile_program(three_units())));
}

TEST_CASE("program text: ShardGradOp gathers once a step") {
  auto input = three_units();
  for (auto& unit : input.units) never_reshard(unit);
  CHECK(training(input) ==
        "forward    wte  | gather wte->own, gather h->own, await wte |\n"
        "forward    h    | gather head->own, await h |\n"
        "forward    head | await head |\n"
        "backward   head | lease head->x | drop head->own, reduce head\n"
        "backward   h    | lease h->y | drop h->own, reduce h\n"
        "backward   wte  | lease wte->x | drop wte->own, reduce wte\n");
}

TEST_CASE("program text: a head that does not shard") {
  auto input = three_units();
  never_shard(input.units[2]);
  CHECK(training(input) ==
        "forward    wte  | gather wte->A, gather h->B, await wte | drop wte->A\n"
        "forward    h    | await h |\n"
        "forward    head | |\n"
        "backward   head | lease head | end head, await gradients head, all-reduce head bucket 0, complete head\n"
        "backward   h    | gather wte->A, lease h->x | drop h->B, reduce h\n"
        "backward   wte  | await wte, lease wte->y | drop wte->A, reduce wte\n");
}

TEST_CASE("program text: three strategies, a micro-step that stays in its shard group, and the next") {
  auto input = three_units();
  never_reshard(input.units[1]);
  never_shard(input.units[2]);
  input.shards = input.replicas = 2;
  input.no_replica_sync = true;
  using namespace fsdp;
  CHECK(training(input, starts_sharded | drops | syncs_group | nothing_waits) ==
        "forward    wte  | gather wte->A, gather h->own, await wte |\n"
        "forward    h    | await h |\n"
        "forward    head | |\n"
        "backward   head | lease head |\n"
        "backward   h    | lease h->x | drop h->own, reduce group h\n"
        "backward   wte  | lease wte->y | drop wte->A, reduce group wte\n");
  CHECK(training(input, starts_sharded | drops | syncs_all | sums_wait) ==
        "forward    wte  | gather wte->A, gather h->own, await wte |\n"
        "forward    h    | await h |\n"
        "forward    head | |\n"
        "backward   head | lease head | end head, await gradients head, all-reduce head bucket 0, complete head\n"
        "backward   h    | lease h->x | drop h->own, reduce h\n"
        "backward   wte  | lease wte->y | drop wte->A, reduce wte\n");
}

TEST_CASE("program text: two gathered ahead") {
  CHECK(training(four_blocks(2)) ==
        "forward    root | gather root->A, gather h.0->B, gather h.1->C, await root | drop root->A\n"
        "forward    h.0  | gather h.2->A, await h.0 | drop h.0->B\n"
        "forward    h.1  | gather h.3->B, await h.1 | drop h.1->C\n"
        "forward    h.2  | await h.2 | drop h.2->A\n"
        "forward    h.3  | await h.3 |\n"
        "backward   h.3  | gather h.2->C, gather h.1->A, lease h.3->x | drop h.3->B, reduce h.3\n"
        "backward   h.2  | gather h.0->B, await h.2, lease h.2->y | drop h.2->C, reduce h.2\n"
        "backward   h.1  | gather root->C, await h.1, lease h.1->x | drop h.1->A, reduce h.1\n"
        "backward   h.0  | await h.0, lease h.0->y | drop h.0->B, reduce h.0\n"
        "backward   root | await root, lease root->x | drop root->C, reduce root\n");
}

TEST_CASE("program text: no more gathered ahead than a limit of bytes lets") {
  auto input = four_blocks(2);
  input.max_ahead_bytes = 1536 * 4;
  CHECK(training(input) ==
        "forward    root | gather root->A, gather h.0->B, await root | drop root->A\n"
        "forward    h.0  | gather h.1->A, await h.0 | drop h.0->B\n"
        "forward    h.1  | gather h.2->B, await h.1 | drop h.1->A\n"
        "forward    h.2  | gather h.3->A, await h.2 | drop h.2->B\n"
        "forward    h.3  | await h.3 |\n"
        "backward   h.3  | gather h.2->B, lease h.3->x | drop h.3->A, reduce h.3\n"
        "backward   h.2  | gather h.1->A, await h.2, lease h.2->y | drop h.2->B, reduce h.2\n"
        "backward   h.1  | gather h.0->B, await h.1, lease h.1->x | drop h.1->A, reduce h.1\n"
        "backward   h.0  | gather root->A, await h.0, lease h.0->y | drop h.0->B, reduce h.0\n"
        "backward   root | await root, lease root->x | drop root->A, reduce root\n");
}

TEST_CASE("program text: lists that gather a unit ahead of one that is used before it") {
  auto input = four_blocks(0);
  input.prefetch.forward[1] = {3};
  input.prefetch.backward[3] = {1};
  CHECK(training(input) ==
        "forward    root | gather root->A, await root | drop root->A\n"
        "forward    h.0  | gather h.0->B, gather h.2->A, await h.0 | drop h.0->B\n"
        "forward    h.1  | gather h.1->B, await h.1 | drop h.1->B\n"
        "forward    h.2  | await h.2 | drop h.2->A\n"
        "forward    h.3  | gather h.3->A, await h.3 |\n"
        "backward   h.3  | lease h.3->x | drop h.3->A, reduce h.3\n"
        "backward   h.2  | gather h.2->B, gather h.0->A, await h.2, lease h.2->y | drop h.2->B, reduce h.2\n"
        "backward   h.1  | gather h.1->B, await h.1, lease h.1->x | drop h.1->B, reduce h.1\n"
        "backward   h.0  | await h.0, lease h.0->y | drop h.0->A, reduce h.0\n"
        "backward   root | gather root->A, await root, lease root->x | drop root->A, reduce root\n");
}

TEST_CASE("program text: nothing is kept between forward and backward") {
  auto input = three_units();
  input.keep_last = input.keep_root = false;
  CHECK(training(input) ==
        "forward    wte  | gather wte->A, gather h->B, await wte | drop wte->A\n"
        "forward    h    | gather head->A, await h | drop h->B\n"
        "forward    head | await head | drop head->A\n"
        "backward   head | gather head->B, gather h->A, await head, lease head->x | drop head->B, reduce head\n"
        "backward   h    | gather wte->B, await h, lease h->y | drop h->A, reduce h\n"
        "backward   wte  | await wte, lease wte->x | drop wte->B, reduce wte\n");
}

TEST_CASE("program text: gradients that wait beside slots too narrow for sums") {
  auto input = three_units();
  input.no_sync = true;
  input.reduce_is_master = false;
  input.reduce_bytes = 2;
  using namespace fsdp;
  CHECK(training(input, starts_sharded | drops | syncs_none | nothing_waits) ==
        "forward    wte  | gather wte->A, gather h->B, await wte | drop wte->A\n"
        "forward    h    | gather head->A, await h | drop h->B\n"
        "forward    head | await head |\n"
        "backward   head | gather h->B, lease head->x | drop head->A, hold head\n"
        "backward   h    | gather wte->A, await h, lease h->y | drop h->B, hold h\n"
        "backward   wte  | await wte, lease wte->x | drop wte->A, hold wte\n");
  CHECK(training(input, starts_sharded | drops | syncs_all | gradients_wait) ==
        "forward    wte  | gather wte->A, gather h->B, await wte | drop wte->A\n"
        "forward    h    | gather head->A, await h | drop h->B\n"
        "forward    head | await head |\n"
        "backward   head | gather h->B, lease head->x | drop head->A, add held head, reduce head\n"
        "backward   h    | gather wte->A, await h, lease h->y | drop h->B, add held h, reduce h\n"
        "backward   wte  | await wte, lease wte->x | drop wte->A, add held wte, reduce wte\n");
}

TEST_CASE("program text: gradients that wait where backward writes them") {
  auto input = three_units();
  input.no_sync = true;
  using namespace fsdp;
  CHECK(training(input, starts_sharded | drops | syncs_none | nothing_waits) ==
        "forward    wte  | gather wte->A, gather h->B, await wte | drop wte->A\n"
        "forward    h    | gather head->A, await h | drop h->B\n"
        "forward    head | await head |\n"
        "backward   head | gather h->B, lease head->own | drop head->A\n"
        "backward   h    | gather wte->A, await h, lease h->own | drop h->B\n"
        "backward   wte  | await wte, lease wte->own | drop wte->A\n");
}

TEST_CASE("program text: parameters that stay for the next micro-step") {
  auto input = three_units();
  input.keep_unsharded = true;
  using namespace fsdp;
  CHECK(training(input, starts_sharded | keeps | syncs_all | nothing_waits) ==
        "forward    wte  | gather wte->own, gather h->own, await wte | drop wte->own\n"
        "forward    h    | gather head->own, await h | drop h->own\n"
        "forward    head | await head |\n"
        "backward   head | gather h->own, lease head->x | reduce head\n"
        "backward   h    | gather wte->own, await h, lease h->y | reduce h\n"
        "backward   wte  | await wte, lease wte->x | reduce wte\n");
  CHECK(training(input, starts_unsharded | drops | syncs_all | nothing_waits) ==
        "forward    wte  | | drop wte->own\n"
        "forward    h    | | drop h->own\n"
        "forward    head | |\n"
        "backward   head | gather h->own, lease head->x | drop head->own, reduce head\n"
        "backward   h    | gather wte->own, await h, lease h->y | drop h->own, reduce h\n"
        "backward   wte  | await wte, lease wte->x | drop wte->own, reduce wte\n");
}

TEST_CASE("program text: a unit of neighbours is gathered for the first of them and dropped after the last") {
  auto input = blocks_in_pairs();
  CHECK(training(input) ==
        "forward    wte  | gather root->own, gather h.0-1->A, await root |\n"
        "forward    h.0  | gather h.2-3->B, await h.0-1 |\n"
        "forward    h.1  | | drop h.0-1->A\n"
        "forward    h.2  | await h.2-3 |\n"
        "forward    h.3  | |\n"
        "forward    head | |\n"
        "backward   head | lease root->own |\n"
        "backward   h.3  | gather h.0-1->A, lease h.2-3->x |\n"
        "backward   h.2  | | drop h.2-3->B, reduce h.2-3\n"
        "backward   h.1  | await h.0-1, lease h.0-1->y |\n"
        "backward   h.0  | | drop h.0-1->A, reduce h.0-1\n"
        "backward   wte  | | drop root->own, reduce root\n");
  input.prefetch = fsdp::prefetch_by_depth(fsdp::testing::schedule_of(input), 0, 0);
  input.keep_last = false;
  auto const whole = to_text(fsdp::compile_program(input), fsdp::plain_step);
  CHECK(whole.substr(whole.find("evaluation")) ==
        "evaluation wte  | gather root->own, await root |\n"
        "evaluation h.0  | gather h.0-1->A, await h.0-1 |\n"
        "evaluation h.1  | | drop h.0-1->A\n"
        "evaluation h.2  | gather h.2-3->A, await h.2-3 |\n"
        "evaluation h.3  | | drop h.2-3->A\n"
        "evaluation head | | drop root->own\n");
}
