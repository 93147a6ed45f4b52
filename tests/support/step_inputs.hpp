// SPDX-License-Identifier: Apache-2.0
// Steps on paper, for tests that need no engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/detail/step/compile_program.hpp"
#include "fsdp/detail/step/passes.hpp"
#include "fsdp/detail/step/uses.hpp"

namespace fsdp::testing {

/// All units get the same types.
inline void set_types(StepInput& input, ElementTypes const& types) {
  for (auto& unit : input.units) unit.types = types;
}

/// Equal units 'u0', 'u1', ..., each used once, in order.
inline StepInput equal_units(int count, int shards, int replicas = 1) {
  StepInput input;
  for (int u = 0; u < count; ++u) {
    input.units.push_back({1024, "u" + std::to_string(u)});
    input.uses.push_back(static_cast<std::size_t>(u));
  }
  input.shards = shards;
  input.replicas = replicas;
  return input;
}
/// Each segment has its first and its last use.
inline StepInput with_segments(StepInput input, std::vector<std::pair<std::size_t, std::size_t>> const& segments) {
  input.segments.assign(input.uses.size(), UseOrder::none);
  for (auto const& [first, last] : segments)
    for (auto use = first; use <= last; ++use) input.segments[use] = first;
  return input;
}
/// Gathers `forward` units ahead in forward, and `backward` in backward.
inline StepInput with_prefetch(StepInput input, int forward, int backward) {
  UseOrder schedule;
  for (auto const unit : input.uses) schedule.declare(unit, "");
  for (std::size_t use = 0; use < input.segments.size(); ++use) schedule.set_segment(use, input.segments[use]);
  input.prefetch = prefetch_by_depth(schedule, forward, backward);
  return input;
}

/// A step's program, and a run of it. Stays where it is.
struct PaperStep {
  /// @param sets_gradients, padded  of all units
  explicit PaperStep(StepInput of, bool sets_gradients = false, bool padded = false)
      : input(with_facts(std::move(of), sets_gradients, padded)), program(compile_program(input)) {
    run.prepare();
  }
  PaperStep(PaperStep const&) = delete;

  StepInput const input;
  Program const program;
  std::vector<step::Executed> list;  ///< operations so far
  step::Run<decltype(step::record_into(list))> run{program, step::record_into(list)};

 private:
  static StepInput with_facts(StepInput input, bool sets_gradients, bool padded) {
    for (auto& unit : input.units) unit.sets_gradients = sets_gradients, unit.padded = padded;
    return input;
  }
};

}  // namespace fsdp::testing
