// SPDX-License-Identifier: Apache-2.0
// The buffers of gradients that are rounded for the sum over ranks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "fsdp/step/program.hpp"
#include "fsdp/step/step_input.hpp"

namespace fsdp::detail {

/// The unit's gradients are rounded when it is reduced. Those of a unit that no other rank shares travel in buckets.
inline bool is_rounded(Program const& program, std::size_t unit) {
  return program.wire && !program.units[unit].writes_shards;
}

/// [Note: Wires] Where ranks sum in a narrower type than backward writes, a unit's gradients are rounded into a wire
/// buffer, which travels; their slot is free as soon as that is done. The reduce stream does one unit after another, so
/// that one buffer serves all. With replicas there are two, so that one unit is reduce-scattered while the one before
/// it is all-reduced. Buckets are rounded on the replicate stream, into a buffer of their own.
/// @pre units and buckets are described
[[gnu::cold]] inline void give_wires(Program& program, StepInput const& input) {
  program.param_bytes = input.param_bytes;
  program.reduce_bytes = input.wire ? size_of(*input.wire) : input.reduce_bytes;
  program.wire = input.wire;
  if (!input.wire) return;
  std::int64_t largest = 0, largest_bucket = 0;
  std::size_t rounded = 0;
  bool replicated = false;
  for (std::size_t u = 0; u < program.units.size(); ++u) {
    if (!is_rounded(program, u)) continue;
    auto const& unit = program.units[u];
    largest = std::max(largest, unit.elements);
    replicated = replicated || (unit.replicas > 1 && !unit.waits_for_replicas);
    ++rounded;
  }
  program.wires.assign(std::min<std::size_t>(rounded, replicated ? 2 : 1), {largest});
  for (auto const& bucket : program.buckets) largest_bucket = std::max(largest_bucket, bucket.size());
  if (largest_bucket == 0) return;
  program.bucket_wire = static_cast<std::uint32_t>(program.wires.size());
  program.wires.push_back({largest_bucket});
}

/// The buffer that the unit is rounded into, the next in turn; or Operation::no_slot.
/// @param rounded  units so far
inline std::uint32_t wire_of(Program const& program, std::size_t unit, std::uint32_t& rounded) {
  if (!is_rounded(program, unit)) return Operation::no_slot;
  auto const in_turn =
      static_cast<std::uint32_t>(program.wires.size()) - (program.bucket_wire != Operation::no_slot ? 1 : 0);
  return rounded++ % in_turn;
}

}  // namespace fsdp::detail
