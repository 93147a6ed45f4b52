// SPDX-License-Identifier: Apache-2.0
// What a run will need, in bytes: the one place that computes it. docs/strategies.md derives the formulas.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "fsdp/flat_param.hpp"
#include "fsdp/layout.hpp"

namespace fsdp {

/// A unit as the plan sees it.
struct UnitSize {
  std::int64_t padded = 0;  ///< elements with padding
  bool held = false;        ///< unsharded from its first use to its last (a root)
};

struct MemoryPlanInput {
  std::vector<UnitSize> units;  ///< in the declared order of first use
  int world = 1;
  int shards = 1;                      ///< ranks per shard group
  bool reshards_after_forward = true;  ///< false: every unit keeps a buffer of its own
  bool accumulate_unsharded = false;   ///< every unit keeps a gradient slot of its own
  int prefetch = 1;
  std::size_t param_bytes = 4;   ///< size of a parameter as forward reads it
  std::size_t reduce_bytes = 4;  ///< size of a gradient as backward writes it
  std::size_t master_bytes = 4;  ///< size of a master weight
  bool param_is_master = true;   ///< parameters have the master's type
  bool reduce_is_master = true;  ///< gradients have the shard's type, fp32
  int moments = 2;               ///< optimizer values per parameter
  std::size_t moment_bytes = 4;  ///< size of each
};

/// Bytes per rank.
struct MemoryPlan {
  std::int64_t parameters = 0;     ///< S
  std::int64_t gradients = 0;      ///< S
  std::int64_t optimizer = 0;      ///< 2 S with AdamW
  std::int64_t gather = 0;         ///< buffers of full parameters
  std::int64_t reduce = 0;         ///< slots of full gradients
  std::int64_t live_forward = 0;   ///< highest use during a forward pass
  std::int64_t live_backward = 0;  ///< highest use during a backward pass that reduces
  std::int64_t rest() const { return parameters + gradients + optimizer; }
  std::int64_t reserved() const { return rest() + gather + reduce; }

  std::size_t shared_gather_slots = 0;  ///< p
  std::size_t shared_reduce_slots = 0;  ///< q
  std::int64_t largest_shared = 0;      ///< elements of the largest unit that takes turns
};

/// Bytes of a full-size buffer of `elements`.
constexpr std::int64_t slot_bytes(std::int64_t elements, std::size_t element_bytes) {
  return align_up(elements * static_cast<std::int64_t>(element_bytes), 256);
}

/// Computes reserved bytes, and the highest live bytes when every pass prefetches as declared.
inline MemoryPlan memory_plan(MemoryPlanInput const& input) {
  MemoryPlan plan;
  std::int64_t total = 0, total_held = 0;
  std::vector<std::int64_t> blocks;  // elements of the units that are not held, in order
  for (auto const& unit : input.units) {
    total += unit.padded;
    if (unit.held) total_held += unit.padded;
    if (!unit.held) blocks.push_back(unit.padded);
    if (!unit.held) plan.largest_shared = std::max(plan.largest_shared, unit.padded);
  }
  std::int64_t const shard = total / input.shards;
  plan.parameters = shard * static_cast<std::int64_t>(input.master_bytes);
  plan.gradients = shard * 4;
  plan.optimizer = shard * input.moments * static_cast<std::int64_t>(input.moment_bytes);

  auto const n = blocks.size();
  auto const window = static_cast<std::size_t>(input.prefetch) + 1;
  bool const gathers = input.shards > 1 || !input.param_is_master;
  bool const reduces = input.shards > 1 || !input.reduce_is_master;
  auto const sum = [&](std::size_t begin, std::size_t end) {
    std::int64_t elements = 0;
    for (auto i = begin; i < std::min(end, n); ++i) elements += blocks[i];
    return elements;
  };
  auto const param = static_cast<std::int64_t>(input.param_bytes);
  auto const grad = static_cast<std::int64_t>(input.reduce_bytes);

  if (gathers) {
    plan.shared_gather_slots = input.reshards_after_forward ? std::min(n, window) : 0;
    for (auto const& unit : input.units)
      if (unit.held || !input.reshards_after_forward) plan.gather += slot_bytes(unit.padded, input.param_bytes);
    plan.gather +=
        static_cast<std::int64_t>(plan.shared_gather_slots) * slot_bytes(plan.largest_shared, input.param_bytes);
  }
  if (reduces) {
    plan.shared_reduce_slots = input.accumulate_unsharded ? 0 : std::min<std::size_t>(n, 2);
    for (auto const& unit : input.units)
      if (unit.held || input.accumulate_unsharded) plan.reduce += slot_bytes(unit.padded, input.reduce_bytes);
    plan.reduce +=
        static_cast<std::int64_t>(plan.shared_reduce_slots) * slot_bytes(plan.largest_shared, input.reduce_bytes);
  }

  // Forward: while block i computes, the following `prefetch` blocks are there or on their way.
  std::int64_t forward = 0, backward = 0;
  for (std::size_t i = 0; i < n; ++i) {
    forward = std::max(forward, input.reshards_after_forward ? sum(i, i + window) : sum(0, n));
    // Backward: blocks i, i-1, ... i-prefetch are there; the gradients of block i+1 are still being reduced.
    auto const first = i + 1 < window ? 0 : i + 1 - window;
    auto const parameters = input.reshards_after_forward ? sum(first, i + 1) : sum(0, i + 1);
    auto const gradients = input.accumulate_unsharded ? sum(i, n) : sum(i, i + 2);
    backward = std::max(backward, (gathers ? parameters * param : 0) + (reduces ? gradients * grad : 0));
  }
  plan.live_forward = plan.rest() + (gathers ? (forward + total_held) * param : 0);
  plan.live_backward = plan.rest() + backward + (gathers ? total_held * param : 0) + (reduces ? total_held * grad : 0);
  return plan;
}

}  // namespace fsdp
