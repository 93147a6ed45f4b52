// SPDX-License-Identifier: Apache-2.0
// Compiles the program of a step, in four stages.
#pragma once

#include <utility>

#include "fsdp/step/place_buffers.hpp"
#include "fsdp/step/plan_events.hpp"
#include "fsdp/step/plan_units.hpp"
#include "fsdp/step/program.hpp"
#include "fsdp/step/step_input.hpp"
#include "fsdp/step/write_operations.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// Compiles the step that runs as declared.
[[gnu::cold]] inline Program compile_program(StepInput const& input) {
  detail::UnitPlan units(input);
  auto buffers = detail::place_buffers(units);
  auto program = detail::write_operations(std::move(units), std::move(buffers));
  detail::plan_events(program, input);
  return program;
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
