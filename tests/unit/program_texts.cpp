// SPDX-License-Identifier: Apache-2.0
// skip-tsan
// Programs of a dozen declarations, word for word as they are printed.
#include <cstddef>
#include <string>

#include "fsdp/detail/step/memory_plan.hpp"
#include "fsdp/detail/step/program_text.hpp"
#include "tests/catch.hpp"
#include "tests/support/step_inputs.hpp"
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

void never_reshard(fsdp::step::Unit& unit) { unit.reshards_after_forward = false; }
void never_shard(fsdp::step::Unit& unit) { unit.sharded = unit.reshards_after_forward = false; }

/// The lines of the passes that train.
std::string training(fsdp::MemoryPlanInput const& input, fsdp::StepFlags flags = fsdp::plain_step) {
  auto const text = to_text(fsdp::compile_program(input), flags);
  return text.substr(0, text.find("evaluation"));
}

}  // namespace

TEST_CASE("program text: FullShard with a tied root") {
  CHECK(training(tied_root()) ==
        "forward    root | all-gather root->own, all-gather h.0->A |\n"
        "forward    h.0  | all-gather h.1->B | close h.0->A\n"
        "forward    h.1  | all-gather h.2->A | close h.1->B\n"
        "forward    h.2  | |\n"
        "forward    root | |\n"
        "backward   root | open root->own |\n"
        "backward   h.2  | all-gather h.1->B, open h.2->x | close h.2->A, reduce-scatter h.2, zero h.2\n"
        "backward   h.1  | all-gather h.0->A, open h.1->y | close h.1->B, reduce-scatter h.1, zero h.1\n"
        "backward   h.0  | open h.0->x | close h.0->A, reduce-scatter h.0, zero h.0\n"
        "backward   root | | close root->own, reduce-scatter root, zero root\n");
}

TEST_CASE("program text: ShardGradOp, two micro-steps, the first under no_sync") {
  using namespace fsdp;
  auto input = tied_root();
  for (auto& unit : input.units) never_reshard(unit);
  input.allow_no_sync = true;
  CHECK(training(input, starts_sharded | reshards | syncs_none | all_reduced) ==
        "forward    root | all-gather root->own, all-gather h.0->own |\n"
        "forward    h.0  | all-gather h.1->own |\n"
        "forward    h.1  | all-gather h.2->own |\n"
        "forward    h.2  | |\n"
        "forward    root | |\n"
        "backward   root | open root->own |\n"
        "backward   h.2  | open h.2->own | close h.2->own\n"
        "backward   h.1  | open h.1->own | close h.1->own\n"
        "backward   h.0  | open h.0->own | close h.0->own\n"
        "backward   root | | close root->own\n");
  CHECK(training(input, starts_sharded | reshards | syncs_all | gradients_wait) ==
        "forward    root | all-gather root->own, all-gather h.0->own |\n"
        "forward    h.0  | all-gather h.1->own |\n"
        "forward    h.1  | all-gather h.2->own |\n"
        "forward    h.2  | |\n"
        "forward    root | |\n"
        "backward   root | |\n"
        "backward   h.2  | | close h.2->own, reduce-scatter h.2, zero h.2\n"
        "backward   h.1  | | close h.1->own, reduce-scatter h.1, zero h.1\n"
        "backward   h.0  | | close h.0->own, reduce-scatter h.0, zero h.0\n"
        "backward   root | | close root->own, reduce-scatter root, zero root\n");
}

TEST_CASE("program text: what depends on the micro-step is said") {
  auto input = tied_root();
  for (auto& unit : input.units) unit.reshards_after_forward = false;
  input.allow_no_sync = true;
  fsdp::testing::set_types(input, {.gradient = fsdp::DType::bf16});
  input.uses = {0, 1};
  input.units.resize(2);
  input.modules = {"wte", "h"};
  CHECK(
      to_text(fsdp::compile_program(input)) ==
      "forward    wte | all-gather root->own if sharded at first, all-gather h.0->own if sharded at first |\n"
      "forward    h   | |\n"
      "backward   h   | open h.0->x | close h.0->own if dropping, accumulate h.0 if no sync, zero h.0 if no sync, "
      "add h.0 if group sync or sync and gradients wait, reduce-scatter h.0 if group sync or sync, zero h.0 if group "
      "sync or sync\n"
      "backward   wte | open root->y | close root->own if dropping, accumulate root if no sync, zero root if no sync, "
      "add root if group sync or sync and gradients wait, reduce-scatter root if group sync or sync, zero root if "
      "group "
      "sync or sync\n"
      "evaluation wte | all-gather root->own, all-gather h.0->own | close root->own\n"
      "evaluation h   | | close h.0->own\n");
}

TEST_CASE("program text: kept slices, replicas that wait, and nothing to move") {
  auto input = tied_root();
  input.reshard_ranks = 2;
  input.prefetch = fsdp::prefetch_by_depth(fsdp::testing::schedule_of(input), 0, 0);
  input.replicas = 2;
  input.allow_no_replica_sync = true;
  CHECK(training(input) ==
        "forward    root | all-gather root->own |\n"
        "forward    h.0  | all-gather h.0->A | keep slice h.0, close h.0->A\n"
        "forward    h.1  | all-gather h.1->A | keep slice h.1, close h.1->A\n"
        "forward    h.2  | all-gather h.2->A |\n"
        "forward    root | |\n"
        "backward   root | open root->own |\n"
        "backward   h.2  | open h.2->x | close h.2->A, reduce-scatter h.2, accumulate h.2, zero h.2, all-reduce h.2\n"
        "backward   h.1  | all-gather h.1->A, open h.1->y | close h.1->A, reduce-scatter h.1, accumulate h.1, zero "
        "h.1, all-reduce h.1\n"
        "backward   h.0  | all-gather h.0->A, open h.0->x | close h.0->A, reduce-scatter h.0, accumulate h.0, zero "
        "h.0, all-reduce h.0\n"
        "backward   root | | close root->own, reduce-scatter root, accumulate root, zero root, all-reduce root\n");
  auto const all = to_text(fsdp::compile_program(input));
  CHECK(all.find("reduce-scatter h.1 if group sync or sync, accumulate h.1 if group sync or sync, zero h.1 if group "
                 "sync or sync, "
                 "all-reduce h.1 if sync\n") != std::string::npos);
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
        "backward   root | zero root unless begun, open root |\n"
        "backward   h.2  | zero h.2 unless begun, open h.2 | all-reduce h.2 bucket 0\n"
        "backward   h.1  | zero h.1 unless begun, open h.1 | all-reduce h.1 bucket 1\n"
        "backward   h.0  | zero h.0 unless begun, open h.0 | all-reduce h.0 bucket 2\n"
        "backward   root | | all-reduce root bucket 3\n");
}

TEST_CASE("program text: FullShard, and its evaluation") {
  CHECK(to_text(fsdp::compile_program(three_units()), fsdp::plain_step) ==
        "forward    wte  | all-gather wte->A, all-gather h->B | close wte->A\n"
        "forward    h    | all-gather head->A | close h->B\n"
        "forward    head | |\n"
        "backward   head | all-gather h->B, open head->x | close head->A, reduce-scatter head, zero head\n"
        "backward   h    | all-gather wte->A, open h->y | close h->B, reduce-scatter h, zero h\n"
        "backward   wte  | open wte->x | close wte->A, reduce-scatter wte, zero wte\n"
        "evaluation wte  | all-gather wte->A, all-gather h->B | close wte->A\n"
        "evaluation h    | all-gather head->A | close h->B\n"
        "evaluation head | | close head->A\n");
}

TEST_CASE("program text: HybridShard moves the same, within its groups and then over them") {
  auto input = three_units();
  input.shards = input.replicas = 2;
  auto text = to_text(fsdp::compile_program(input), fsdp::plain_step);
  for (std::string const unit : {"wte", "h", "head"}) {
    auto const over_groups = ", all-reduce " + unit + ", zero";
    auto const at = text.find(over_groups);
    REQUIRE(at != std::string::npos);
    text.replace(at, over_groups.size(), ", zero");
  }
  CHECK(text == to_text(fsdp::compile_program(three_units()), fsdp::plain_step));
}

TEST_CASE("program text: ShardGradOp gathers once a step") {
  auto input = three_units();
  for (auto& unit : input.units) never_reshard(unit);
  CHECK(training(input) ==
        "forward    wte  | all-gather wte->own, all-gather h->own |\n"
        "forward    h    | all-gather head->own |\n"
        "forward    head | |\n"
        "backward   head | open head->x | close head->own, reduce-scatter head, zero head\n"
        "backward   h    | open h->y | close h->own, reduce-scatter h, zero h\n"
        "backward   wte  | open wte->x | close wte->own, reduce-scatter wte, zero wte\n");
}

TEST_CASE("program text: a head that does not shard") {
  auto input = three_units();
  never_shard(input.units[2]);
  CHECK(training(input) ==
        "forward    wte  | all-gather wte->A, all-gather h->B | close wte->A\n"
        "forward    h    | |\n"
        "forward    head | |\n"
        "backward   head | zero head unless begun, open head | all-reduce head bucket 0\n"
        "backward   h    | all-gather wte->A, open h->x | close h->B, reduce-scatter h, zero h\n"
        "backward   wte  | open wte->y | close wte->A, reduce-scatter wte, zero wte\n");
}

TEST_CASE("program text: three strategies, a micro-step that stays in its shard group, and the next") {
  auto input = three_units();
  never_reshard(input.units[1]);
  never_shard(input.units[2]);
  input.shards = input.replicas = 2;
  input.allow_no_replica_sync = true;
  using namespace fsdp;
  CHECK(training(input, starts_sharded | reshards | syncs_group | all_reduced) ==
        "forward    wte  | all-gather wte->A, all-gather h->own |\n"
        "forward    h    | |\n"
        "forward    head | |\n"
        "backward   head | zero head unless begun, open head |\n"
        "backward   h    | open h->x | close h->own, reduce-scatter h, accumulate h, zero h\n"
        "backward   wte  | open wte->y | close wte->A, reduce-scatter wte, accumulate wte, zero wte\n");
  CHECK(training(input, starts_sharded | reshards | syncs_all | group_sums_wait) ==
        "forward    wte  | all-gather wte->A, all-gather h->own |\n"
        "forward    h    | |\n"
        "forward    head | |\n"
        "backward   head | zero head unless begun, open head | all-reduce head bucket 0\n"
        "backward   h    | open h->x | close h->own, reduce-scatter h, accumulate h, zero h, all-reduce h\n"
        "backward   wte  | open wte->y | close wte->A, reduce-scatter wte, accumulate wte, zero wte, all-reduce wte\n");
}

TEST_CASE("program text: two gathered ahead") {
  CHECK(training(four_blocks(2)) ==
        "forward    root | all-gather root->A, all-gather h.0->B, all-gather h.1->C | close root->A\n"
        "forward    h.0  | all-gather h.2->A | close h.0->B\n"
        "forward    h.1  | all-gather h.3->B | close h.1->C\n"
        "forward    h.2  | | close h.2->A\n"
        "forward    h.3  | |\n"
        "backward   h.3  | all-gather h.2->C, all-gather h.1->A, open h.3->x | close h.3->B, reduce-scatter h.3, zero "
        "h.3\n"
        "backward   h.2  | all-gather h.0->B, open h.2->y | close h.2->C, reduce-scatter h.2, zero h.2\n"
        "backward   h.1  | all-gather root->C, open h.1->x | close h.1->A, reduce-scatter h.1, zero h.1\n"
        "backward   h.0  | open h.0->y | close h.0->B, reduce-scatter h.0, zero h.0\n"
        "backward   root | open root->x | close root->C, reduce-scatter root, zero root\n");
}

TEST_CASE("program text: no more gathered ahead than a limit of bytes lets") {
  auto input = four_blocks(2);
  input.max_ahead_bytes = 1536 * 4;
  CHECK(training(input) ==
        "forward    root | all-gather root->A, all-gather h.0->B | close root->A\n"
        "forward    h.0  | all-gather h.1->A | close h.0->B\n"
        "forward    h.1  | all-gather h.2->B | close h.1->A\n"
        "forward    h.2  | all-gather h.3->A | close h.2->B\n"
        "forward    h.3  | |\n"
        "backward   h.3  | all-gather h.2->B, open h.3->x | close h.3->A, reduce-scatter h.3, zero h.3\n"
        "backward   h.2  | all-gather h.1->A, open h.2->y | close h.2->B, reduce-scatter h.2, zero h.2\n"
        "backward   h.1  | all-gather h.0->B, open h.1->x | close h.1->A, reduce-scatter h.1, zero h.1\n"
        "backward   h.0  | all-gather root->A, open h.0->y | close h.0->B, reduce-scatter h.0, zero h.0\n"
        "backward   root | open root->x | close root->A, reduce-scatter root, zero root\n");
}

TEST_CASE("program text: lists that gather a unit ahead of one that is used before it") {
  auto input = four_blocks(0);
  input.prefetch.forward[1] = {3};
  input.prefetch.backward[3] = {1};
  CHECK(training(input) ==
        "forward    root | all-gather root->A | close root->A\n"
        "forward    h.0  | all-gather h.0->B, all-gather h.2->A | close h.0->B\n"
        "forward    h.1  | all-gather h.1->B | close h.1->B\n"
        "forward    h.2  | | close h.2->A\n"
        "forward    h.3  | all-gather h.3->A |\n"
        "backward   h.3  | open h.3->x | close h.3->A, reduce-scatter h.3, zero h.3\n"
        "backward   h.2  | all-gather h.2->B, all-gather h.0->A, open h.2->y | close h.2->B, reduce-scatter h.2, zero "
        "h.2\n"
        "backward   h.1  | all-gather h.1->B, open h.1->x | close h.1->B, reduce-scatter h.1, zero h.1\n"
        "backward   h.0  | open h.0->y | close h.0->A, reduce-scatter h.0, zero h.0\n"
        "backward   root | all-gather root->A, open root->x | close root->A, reduce-scatter root, zero root\n");
}

TEST_CASE("program text: nothing is kept between forward and backward") {
  auto input = three_units();
  input.keep_last = input.keep_root = false;
  CHECK(training(input) ==
        "forward    wte  | all-gather wte->A, all-gather h->B | close wte->A\n"
        "forward    h    | all-gather head->A | close h->B\n"
        "forward    head | | close head->A\n"
        "backward   head | all-gather head->B, all-gather h->A, open head->x | close head->B, reduce-scatter head, "
        "zero head\n"
        "backward   h    | all-gather wte->B, open h->y | close h->A, reduce-scatter h, zero h\n"
        "backward   wte  | open wte->x | close wte->B, reduce-scatter wte, zero wte\n");
}

TEST_CASE("program text: gradients that wait beside slots too narrow for sums") {
  auto input = three_units();
  input.allow_no_sync = true;
  fsdp::testing::set_types(input, {.gradient = fsdp::DType::bf16});
  using namespace fsdp;
  CHECK(training(input, starts_sharded | reshards | syncs_none | all_reduced) ==
        "forward    wte  | all-gather wte->A, all-gather h->B | close wte->A\n"
        "forward    h    | all-gather head->A | close h->B\n"
        "forward    head | |\n"
        "backward   head | all-gather h->B, open head->x | close head->A, accumulate head, zero head\n"
        "backward   h    | all-gather wte->A, open h->y | close h->B, accumulate h, zero h\n"
        "backward   wte  | open wte->x | close wte->A, accumulate wte, zero wte\n");
  CHECK(training(input, starts_sharded | reshards | syncs_all | gradients_wait) ==
        "forward    wte  | all-gather wte->A, all-gather h->B | close wte->A\n"
        "forward    h    | all-gather head->A | close h->B\n"
        "forward    head | |\n"
        "backward   head | all-gather h->B, open head->x | close head->A, add head, reduce-scatter head, zero head\n"
        "backward   h    | all-gather wte->A, open h->y | close h->B, add h, reduce-scatter h, zero h\n"
        "backward   wte  | open wte->x | close wte->A, add wte, reduce-scatter wte, zero wte\n");
}

TEST_CASE("program text: gradients that wait where backward writes them") {
  auto input = three_units();
  input.allow_no_sync = true;
  using namespace fsdp;
  CHECK(training(input, starts_sharded | reshards | syncs_none | all_reduced) ==
        "forward    wte  | all-gather wte->A, all-gather h->B | close wte->A\n"
        "forward    h    | all-gather head->A | close h->B\n"
        "forward    head | |\n"
        "backward   head | all-gather h->B, open head->own | close head->A\n"
        "backward   h    | all-gather wte->A, open h->own | close h->B\n"
        "backward   wte  | open wte->own | close wte->A\n");
}

TEST_CASE("program text: parameters that stay for the next micro-step") {
  auto input = three_units();
  input.allow_keep_unsharded = true;
  using namespace fsdp;
  CHECK(training(input, starts_sharded | stays_unsharded | syncs_all | all_reduced) ==
        "forward    wte  | all-gather wte->own, all-gather h->own | close wte->own\n"
        "forward    h    | all-gather head->own | close h->own\n"
        "forward    head | |\n"
        "backward   head | all-gather h->own, open head->x | reduce-scatter head, zero head\n"
        "backward   h    | all-gather wte->own, open h->y | reduce-scatter h, zero h\n"
        "backward   wte  | open wte->x | reduce-scatter wte, zero wte\n");
  CHECK(training(input, starts_unsharded | reshards | syncs_all | all_reduced) ==
        "forward    wte  | | close wte->own\n"
        "forward    h    | | close h->own\n"
        "forward    head | |\n"
        "backward   head | all-gather h->own, open head->x | close head->own, reduce-scatter head, zero head\n"
        "backward   h    | all-gather wte->own, open h->y | close h->own, reduce-scatter h, zero h\n"
        "backward   wte  | open wte->x | close wte->own, reduce-scatter wte, zero wte\n");
}

TEST_CASE("program text: a unit of neighbours is gathered for the first of them and dropped after the last") {
  auto input = blocks_in_pairs();
  CHECK(training(input) ==
        "forward    wte  | all-gather root->own, all-gather h.0-1->A |\n"
        "forward    h.0  | all-gather h.2-3->B |\n"
        "forward    h.1  | | close h.0-1->A\n"
        "forward    h.2  | |\n"
        "forward    h.3  | |\n"
        "forward    head | |\n"
        "backward   head | open root->own |\n"
        "backward   h.3  | all-gather h.0-1->A, open h.2-3->x |\n"
        "backward   h.2  | | close h.2-3->B, reduce-scatter h.2-3, zero h.2-3\n"
        "backward   h.1  | open h.0-1->y |\n"
        "backward   h.0  | | close h.0-1->A, reduce-scatter h.0-1, zero h.0-1\n"
        "backward   wte  | | close root->own, reduce-scatter root, zero root\n");
  input.prefetch = fsdp::prefetch_by_depth(fsdp::testing::schedule_of(input), 0, 0);
  input.keep_last = false;
  auto const whole = to_text(fsdp::compile_program(input), fsdp::plain_step);
  CHECK(whole.substr(whole.find("evaluation")) ==
        "evaluation wte  | all-gather root->own |\n"
        "evaluation h.0  | all-gather h.0-1->A |\n"
        "evaluation h.1  | | close h.0-1->A\n"
        "evaluation h.2  | all-gather h.2-3->A |\n"
        "evaluation h.3  | | close h.2-3->A\n"
        "evaluation head | | close root->own\n");
}

TEST_CASE("program text: functions of the caller on reduced gradients") {
  auto input = three_units();
  for (auto const u : {0u, 2u}) input.units[u].hooked = true;
  auto const backward = [&](fsdp::StepFlags flags) {
    auto const text = training(input, flags);
    return text.substr(text.find("backward"));
  };
  CHECK(backward(fsdp::plain_step) ==
        "backward   head | all-gather h->B, open head->x | close head->A, reduce-scatter head, zero head, hook head\n"
        "backward   h    | all-gather wte->A, open h->y | close h->B, reduce-scatter h, zero h\n"
        "backward   wte  | open wte->x | close wte->A, reduce-scatter wte, zero wte, hook wte\n");
  input.shards = 1, input.replicas = 2;
  input.bucket_bytes = input.first_bucket_bytes = 4096;
  CHECK(backward(fsdp::any_flags) ==
        "backward   head | zero head unless begun, open head |\n"
        "backward   h    | zero h unless begun, open h | all-reduce h bucket 0 if sync, hook head if sync, "
        "all-reduce h bucket 1 if sync\n"
        "backward   wte  | zero wte unless begun, open wte | all-reduce wte bucket 2 if sync, hook wte if sync\n");
  input.replicas = 1;
  CHECK(backward(fsdp::any_flags) ==
        "backward   head | zero head unless begun, open head | hook head if group sync or sync\n"
        "backward   h    | zero h unless begun, open h |\n"
        "backward   wte  | zero wte unless begun, open wte | hook wte if group sync or sync\n");
}
