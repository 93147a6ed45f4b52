// SPDX-License-Identifier: Apache-2.0
// The header of a run, for its log.
#pragma once

#include <cstddef>
#include <set>
#include <string>
#include <string_view>

#include "fsdp/memory.hpp"
#include "fsdp/program.hpp"
#include "transformer/launch/job.hpp"
#include "transformer/launch/machine.hpp"
#include "transformer/report/log_lines.hpp"
#include "transformer/training/preparation.hpp"

namespace transformer {

/// Machines that the ranks run on. @note Collective: yes; blocks.
template <class C>
std::size_t count_hosts(C& world) {
  auto const names = world.exchange(host_name(), "hosts");
  return std::set<std::string>(names.begin(), names.end()).size();
}

/// The header without model, program and plan.
/// @param hosts  as count_hosts counts them
/// @param gpu    its description; empty on the host
RunHeader run_header(Job const& job, Prepared const& ready, std::size_t hosts, int ranks, std::string_view strategy,
                     std::string const& gpu);

/// The header with model, program and plan.
template <class T>
RunHeader run_header(T& trainer, Job const& job, Preparation<typename T::Program> const& ready, std::size_t hosts) {
  auto& engine = trainer.engine();
  std::string gpu;
  if constexpr (requires { engine.device().description(); }) gpu = engine.device().description();
  auto header = run_header(job, ready, hosts, engine.world_size(), engine.strategy().name, gpu);
  header.model = T::Program::numbers(ready.config);
  header.program = fsdp::to_text(engine.program());
  auto const plan = fsdp::memory_plan(engine.program(), engine.plan_input());
  header.plan = {{fsdp::MemoryTag::parameters, plan.parameters}, {fsdp::MemoryTag::gradients, plan.gradients},
                 {fsdp::MemoryTag::optimizer, plan.optimizer},   {fsdp::MemoryTag::gather, plan.gather},
                 {fsdp::MemoryTag::reduce, plan.reduce},         {fsdp::MemoryTag::offloaded, plan.host}};
  return header;
}

}  // namespace transformer
