// SPDX-License-Identifier: Apache-2.0
// What is known of a run when it starts, for its log.
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <filesystem>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "fsdp/memory.hpp"
#include "fsdp/step/memory_plan.hpp"
#include "fsdp/step/program_text.hpp"
#include "transformer/launch/job.hpp"
#include "transformer/launch/machine.hpp"
#include "transformer/launch/process.hpp"
#include "transformer/math/blas.hpp"
#include "transformer/report/log_lines.hpp"
#include "transformer/report/metrics.hpp"
#include "transformer/run/choices.hpp"
#include "transformer/run/table.hpp"
#include "transformer/training/preparation.hpp"

namespace transformer {

/// Machines that the ranks run on. @note Collective: yes; blocks.
template <class C>
std::size_t count_hosts(C& world) {
  auto const names = world.exchange(host_name(), "hosts");
  return std::set<std::string>(names.begin(), names.end()).size();
}

/// @param hosts  as count_hosts counts them
template <class T>
RunHeader run_header(T& trainer, Job const& job, Preparation<typename T::Program> const& ready, std::size_t hosts) {
  auto& engine = trainer.engine();
  RunHeader header;
  header.iteration = ready.resumed ? ready.resumed->iteration : 0;
  header.resumed = ready.resumed.has_value();
  if (ready.resumed) header.from = ready.resumed->start;
  auto const usual = defaults(job.command);
  for (auto const& setting : all_settings()) {
    if (!setting.exists_in(job.command)) continue;
    auto const text = setting.text_of(job.settings);
    bool const earlier = job.settings.is_of_run(setting.name) && text != setting.text_of(usual);
    header.settings.push_back({setting.name, text, earlier || job.settings.was_given(setting.name)});
  }
  header.ranks = engine.world_size();
  header.model = T::Program::numbers(ready.config);
  header.program = fsdp::to_text(engine.program());
  auto const plan = fsdp::memory_plan(engine.program(), engine.plan_input());
  header.plan = {{fsdp::MemoryTag::parameters, plan.parameters}, {fsdp::MemoryTag::gradients, plan.gradients},
                 {fsdp::MemoryTag::optimizer, plan.optimizer},   {fsdp::MemoryTag::gather, plan.gather},
                 {fsdp::MemoryTag::reduce, plan.reduce},         {fsdp::MemoryTag::offloaded, plan.host}};
  if (!job.settings.trace.empty()) header.trace = std::filesystem::absolute(job.settings.trace);

  auto const note = [&](std::string name, std::string text) {
    header.environment.emplace_back(std::move(name), std::move(text));
  };
  note("ranks", job.world_kind);
  note("hosts", fmt::format("{}", hosts));
  note("strategy", std::string(engine.strategy().name));
  note("device", job.device);
  note("dtype", job.dtype);
  if (engine.world_size() > 1) note("gradients summed in", std::string(summed_in(job.settings)));
  if constexpr (requires { engine.device().description(); }) note("GPU", engine.device().description());
  note("processor", fmt::format("{}, {} threads", processor_name(), std::thread::hardware_concurrency()));
  note("peak",
       fmt::format("{:.4g} GFLOP/s a rank, {}", ready.peak.flops / engine.world_size() / 1e9, ready.peak.source));
  if (job.device == "cpu") {
    auto const blas = blas_info();
    note("BLAS kernels", fmt::format("{}, {} thread{} a rank", blas.core, job.threads, job.threads == 1 ? "" : "s"));
  }
  note("built with", version_text());
  return header;
}

}  // namespace transformer
