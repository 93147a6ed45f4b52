// SPDX-License-Identifier: Apache-2.0
#include "transformer/training/header.hpp"

#include <fmt/format.h>

#include <filesystem>
#include <thread>
#include <utility>

#include "transformer/launch/process.hpp"
#include "transformer/math/blas.hpp"
#include "transformer/run/choices.hpp"
#include "transformer/run/table.hpp"

namespace transformer {

RunHeader run_header(Job const& job, Prepared const& ready, std::size_t hosts, int ranks, std::string_view strategy,
                     std::string const& gpu) {
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
  header.ranks = ranks;
  if (!job.settings.trace.empty()) header.trace = std::filesystem::absolute(job.settings.trace);

  auto const note = [&](std::string name, std::string text) {
    header.environment.emplace_back(std::move(name), std::move(text));
  };
  note("ranks", job.world_kind);
  note("hosts", fmt::format("{}", hosts));
  note("strategy", std::string(strategy));
  note("device", job.device);
  note("dtype", job.dtype);
  if (!job.dtype_note.empty()) note("dtype note", job.dtype_note);
  if (ranks > 1) note("gradients summed in", std::string(summed_in(job.settings)));
  if (!gpu.empty()) note("GPU", gpu);
  note("processor", fmt::format("{}, {} threads", processor_name(), std::thread::hardware_concurrency()));
  note("peak", fmt::format("{:.4g} GFLOP/s a rank, {}", ready.peak.flops / ranks / 1e9, ready.peak.source));
  if (job.device == "cpu") {
    note("BLAS kernels",
         fmt::format("{}, {} thread{} a rank", blas_info().core, job.threads, job.threads == 1 ? "" : "s"));
  }
  note("built with", version_text());
  return header;
}

}  // namespace transformer
