// SPDX-License-Identifier: Apache-2.0
// What a run will need, in bytes: the one place that computes it. docs/strategies.md derives the formulas.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "fsdp/engine/compile_program.hpp"
#include "fsdp/engine/program.hpp"
#include "fsdp/layout.hpp"

namespace fsdp {

struct MemoryPlanInput : StepInput {
  int moments = 2;               ///< optimizer values per parameter
  std::size_t moment_bytes = 4;  ///< size of each
};

/// Bytes per rank.
struct MemoryPlan {
  std::int64_t parameters = 0;        ///< master shards
  std::int64_t gradients = 0;         ///< gradient shards, and those that wait for the all-reduce over replicas
  std::int64_t optimizer = 0;         ///< optimizer state
  std::int64_t gather = 0;            ///< buffers of full parameters, and of what is kept after forward
  std::int64_t reduce = 0;            ///< slots of full gradients, and accumulators of unreduced ones
  std::int64_t live_forward = 0;      ///< highest use during a forward pass
  std::int64_t live_backward = 0;     ///< highest use during a backward pass that reduces
  std::int64_t live_accumulated = 0;  ///< in either, with gradients of an earlier micro-step waiting unreduced
  std::int64_t rest() const { return parameters + gradients + optimizer; }
  std::int64_t reserved() const { return rest() + gather + reduce; }
};

/// Bytes of a full-size buffer of `elements`.
constexpr std::int64_t slot_bytes(std::int64_t elements, std::size_t element_bytes) {
  return align_up(elements * static_cast<std::int64_t>(element_bytes), 256);
}

namespace detail {

/// Bytes of parameters and gradients in use while a program runs.
class LiveBytes {
 public:
  LiveBytes(Program const& program, StepInput const& input)
      : program_(&program),
        param_(static_cast<std::int64_t>(input.param_bytes)),
        reduce_(static_cast<std::int64_t>(input.reduce_bytes)),
        leased_(program.gradient_slots.size(), 0) {}

  /// Gradients of an earlier micro-step wait: in the slots, or in the accumulators.
  void wait_unreduced() {
    if (program_->accumulator_elements > 0) {
      bytes_ += program_->accumulator_elements * static_cast<std::int64_t>(sizeof(float));
      return;
    }
    for (std::uint32_t u = 0; u < program_->units.size(); ++u)
      if (auto const slot = program_->units[u].gradient_slot; slot != Operation::no_slot) lease(slot, u);
  }
  /// Runs a pass. @return the highest use in it
  std::int64_t run(Phase phase, Facts facts) {
    highest_ = bytes_;
    program_->for_each(phase, facts, [this](Operation const& operation) { run(operation); });
    return highest_;
  }

 private:
  void run(Operation const& operation) {
    auto const& unit = program_->units[operation.unit];
    switch (operation.action) {
      case Action::gather: bytes_ += unit.elements * param_; break;
      case Action::keep_slice: bytes_ += kept(unit); break;
      case Action::drop: bytes_ -= unit.elements * param_; break;
      case Action::drop_slice: bytes_ -= kept(unit); break;
      case Action::lease:
        if (operation.slot != Operation::no_slot) lease(operation.slot, operation.unit);
        break;
      default: break;
    }
    highest_ = std::max(highest_, bytes_);
  }
  std::int64_t kept(Program::Unit const& unit) const { return program_->kept_slots[unit.kept_slot].elements * param_; }
  /// A slot's gradients count until its next lease, or the end of the pass.
  void lease(std::uint32_t slot, std::uint32_t unit) {
    auto const bytes = program_->units[unit].elements * reduce_;
    bytes_ += bytes - std::exchange(leased_[slot], bytes);
  }

  Program const* program_;
  std::int64_t param_, reduce_;
  std::vector<std::int64_t> leased_;
  std::int64_t bytes_ = 0, highest_ = 0;
};

}  // namespace detail

/// Reserved bytes, and the highest live bytes of a step, of a program that was compiled from `input`.
inline MemoryPlan memory_plan(Program const& program, MemoryPlanInput const& input) {
  MemoryPlan plan;
  for (auto const& unit : program.units) {
    auto const shard = unit.elements / unit.shards;
    plan.parameters += shard * static_cast<std::int64_t>(input.master_bytes);
    plan.gradients += shard * (unit.waits_for_replicas ? 8 : 4);
    plan.optimizer += shard * input.moments * static_cast<std::int64_t>(input.moment_bytes);
  }
  for (auto const* slots : {&program.gather_slots, &program.kept_slots})
    for (auto const& slot : *slots) plan.gather += slot_bytes(slot.elements, input.param_bytes);
  for (auto const& slot : program.gradient_slots) plan.reduce += slot_bytes(slot.elements, input.reduce_bytes);
  plan.reduce += program.accumulator_elements * static_cast<std::int64_t>(sizeof(float));

  detail::LiveBytes plain(program, input), waiting = plain;
  plan.live_forward = plan.rest() + plain.run(Phase::forward, plain_step);
  plan.live_backward = plan.rest() + plain.run(Phase::backward, plain_step);
  if (input.accumulate_unsharded) waiting.wait_unreduced();
  auto const forward = waiting.run(Phase::forward, plain_step);
  plan.live_accumulated = plan.rest() + std::max(forward, waiting.run(Phase::backward, plain_step));
  return plan;
}
inline MemoryPlan memory_plan(MemoryPlanInput const& input) { return memory_plan(compile_program(input), input); }

}  // namespace fsdp
