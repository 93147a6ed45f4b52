// SPDX-License-Identifier: Apache-2.0
// skip-tsan
// The program of a step: its memory against a walk that knows no programs, and that its slots are never in two hands.
#include "fsdp/detail/step/program.hpp"

#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "fsdp/detail/step/memory_plan.hpp"
#include "fsdp/detail/step/program_text.hpp"
#include "tests/catch.hpp"
#include "tests/support/sanitized.hpp"
#include "tests/support/step_inputs.hpp"
#include "tests/support/step_walk.hpp"

namespace {

using fsdp::PassKind;
using fsdp::step::Pool;
using fsdp::step::Primitive;

}  // namespace

TEST_CASE("program: memory is what a walk through the step counts, and slots pass from hand to hand") {
  std::mt19937 random(7);
  auto const below = [&](unsigned n) { return static_cast<int>(random() % n); };
  for (int trial = 0; trial < (fsdp::testing::sanitized ? 1000 : 6000); ++trial) {
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
    if (below(3) == 0) {  // neighbours of one unit
      auto const at = below(static_cast<unsigned>(input.uses.size()));
      input.uses.insert(input.uses.begin() + at, static_cast<std::size_t>(1 + below(2)),
                        input.uses[static_cast<std::size_t>(at)]);
    }
    input.shards = 1 << below(3);
    input.replicas = 1 << below(2);
    input.keep_last = below(3) > 0;
    input.keep_root = below(3) > 0;
    input.allow_no_replica_sync = below(3) == 0;
    input.prefetch = fsdp::prefetch_by_depth(fsdp::testing::schedule_of(input), below(4), below(4));
    if (below(3) == 0) input.max_ahead_bytes = 1024 * (1 + below(12));
    input.allow_keep_unsharded = below(4) == 0;
    if (input.shards == 4 && !input.allow_keep_unsharded && below(3) == 0) input.reshard_ranks = 2;
    input.allow_no_sync = below(3) == 0;
    fsdp::ElementTypes types;
    if (below(2) == 1) types.parameter = fsdp::DType::bf16;
    if (below(2) == 1) types.gradient = fsdp::DType::bf16;
    fsdp::testing::set_types(input, types);
    if (types.gradient == fsdp::DType::f32 && below(2) == 0) input.wire = fsdp::DType::bf16;
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
      for (auto const kind : {evaluating ? PassKind::evaluation : PassKind::forward, PassKind::backward}) {
        if (evaluating && kind == PassKind::backward) break;
        program.for_each(kind, fsdp::plain_step, [&](fsdp::step::Operation const& operation) {
          for (auto const& [cells, mode] : operation.accesses()) {
            if (cells.pool != Pool::gather) continue;
            auto const slot = fsdp::step::Buffers::index(cells);
            if (operation.primitive == Primitive::open) REQUIRE(holder.emplace(slot, operation.unit).second);
            REQUIRE(holder.at(slot) == operation.unit);
            if (operation.primitive == Primitive::close) holder.erase(slot);
          }
        });
      }
      REQUIRE(holder.empty());
    }
  }
}
