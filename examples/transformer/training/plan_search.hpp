// SPDX-License-Identifier: Apache-2.0
// `plan --hardware`: memory and time of a step on described hardware, for all settings that are not given.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <vector>

#include "fsdp/error.hpp"
#include "fsdp/files.hpp"
#include "fsdp/plan.hpp"
#include "fsdp/program.hpp"
#include "transformer/run/choices.hpp"
#include "transformer/training/plan.hpp"
#include "transformer/training/planned_run.hpp"

namespace transformer {

/// @tparam P  precision
template <class Program, class P, class Device>
PlannedRun plan_run(Settings const& settings, typename Program::Config const& config,
                    fsdp::plan::Hardware const& hardware, Device const& device) {
  auto planned = plan_rank<Program, P>(settings, config, device);
  auto const program = fsdp::compile_program(planned.input);
  fsdp::plan::Workload load;
  load.uses = Program::work(config, planned.activations, sizeof(typename P::Param));
  load.micro_steps = static_cast<int>(planned_micro_steps(settings));
  load.no_sync = !strategy_of(settings).shards;
  PlannedRun run{settings, planned.memory};
  run.time = fsdp::plan::forecast(program, planned.input, load, hardware);
  run.tokens_per_second = static_cast<double>(settings.tokens_per_step()) / run.time.step;
  run.mfu = run.tokens_per_second / static_cast<double>(settings.ranks) * Program::flop_per_token(config, settings) /
            hardware.flops;
  return run;
}

/// The device and type are those of plan_memory().
template <class Program>
PlannedRun plan_run(Settings const& settings, typename Program::Config const& config,
                    fsdp::plan::Hardware const& hardware) {
  auto const on = [&](auto const& device, bool bf16) {
    return bf16 ? plan_run<Program, fsdp::Bf16>(settings, config, hardware, device)
                : plan_run<Program, fsdp::Fp32>(settings, config, hardware, device);
  };
  return on_planned_device(settings, on);
}

/// Searches and prints. @param settings  ranks: the GPUs
template <class Program>
int print_plan_on_hardware(Settings settings, typename Program::Config const& config) {
  auto const hardware =
      fsdp::plan::read_hardware(fsdp::checkpoint::read_text_file(settings.hardware, 1 << 20), settings.hardware);
  expect_plannable(settings, hardware);
  auto const gpus = static_cast<int>(settings.ranks);
  bool const bf16 = plans_bf16(settings);
  auto const micro_steps = planned_micro_steps(settings);
  auto const idle = micro_steps * settings.ranks - settings.gradient_accumulation_steps;
  fmt::print(
      "{} parameters on {} GPUs ({} nodes of {}), {}, AdamW, sequences of {} tokens, {} micro-step{} of a GPU{}\n",
      config.parameters(), gpus, hardware.nodes(gpus), std::min(gpus, hardware.gpus_per_node),
      bf16 ? "bfloat16" : "float32", settings.block_size, micro_steps, micro_steps == 1 ? "" : "s",
      idle > 0 ? fmt::format("; {} GPU{} no sequences in the last one", idle, idle == 1 ? " has" : "s have") : "");
  std::vector<PlannedRun> runs;
  std::exception_ptr refusal;
  for (auto const& next : candidates(settings, hardware, config.parameters())) try {
      check_together(next, Command::plan, next.ranks);
      runs.push_back(plan_run<Program>(next, config, hardware));
    } catch (fsdp::ConfigError const&) {  // contradicts what was given
      if (!refusal) refusal = std::current_exception();
    }
  if (runs.empty()) std::rethrow_exception(refusal);
  return print_planned_runs(runs, hardware);
}

}  // namespace transformer
