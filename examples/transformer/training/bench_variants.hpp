// SPDX-License-Identifier: Apache-2.0
// `bench` of several batch sizes, with and without recomputation: time of a step and memory, as long as memory
// suffices.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "fsdp/fsdp.hpp"
#include "transformer/launch/job.hpp"
#include "transformer/launch/machine.hpp"
#include "transformer/report/metrics.hpp"
#include "transformer/run/bench.hpp"
#include "transformer/run/table.hpp"
#include "transformer/run/variants.hpp"
#include "transformer/training/planned_bytes.hpp"
#include "transformer/training/preparation.hpp"
#include "transformer/training/trainer.hpp"

namespace transformer {

/// Whether `bench` is asked for several runs.
inline bool has_variants(Settings const& settings) {
  return !settings.batch_sizes.empty() || settings.activation_checkpointing == "both";
}

/// Bytes that a rank may use: of its device, or its part of the host's.
/// @note Collective: yes; blocks.
template <class C>
std::int64_t available_bytes(C& world) {
  if constexpr (requires { world.device().memory(); }) {
    return static_cast<std::int64_t>(world.device().memory().free);
  } else {
    auto const hosts = world.exchange(host_name(), "hosts");
    auto const here = std::count(hosts.begin(), hosts.end(), hosts[static_cast<std::size_t>(world.rank())]);
    return available_host_bytes() / here;
  }
}

/// Prints a line for each run, and writes a JSON object. A batch size that does not fit ends the larger ones.
/// @return the exit code
/// @note Collective: yes.
template <class Program, class P, fsdp::Communicator C>
int bench_variants(fsdp::Mesh<C>& mesh, Job const& job, Preparation<Program> const& ready, JsonLog& log) {
  auto& world = mesh.world();
  bool const first = world.rank() == 0;
  auto const setting = name_of(&Settings::activation_checkpointing);
  auto const variants = variants_of(job.settings, {job.settings.batch_size});
  auto const say = [&](std::string const& line) {
    if (!first) return;
    fmt::print("{}\n", line);
    std::fflush(stdout);
  };
  say(fmt::format("{:>10}  {:>22}  {:>10}  {:>10}  {:>14}  {:>14}", "batch_size", setting, "s a step", "tokens/s",
                  "GB by fsdp", "GB by process"));
  for (auto const& recomputation : variants.recomputation) {
    auto sizes = variants.batch_sizes;
    std::sort(sizes.begin(), sizes.end());
    for (auto const batch : sizes) {
      auto settings = job.settings;
      settings.batch_size = batch;
      settings.activation_checkpointing = recomputation;
      settings.ranks = world.size();
      settings.device = job.device;
      settings.dtype = job.dtype;
      settings.threads = job.threads;
      auto const needs = planned_bytes(settings), has = available_bytes(world);
      auto const fits = world.exchange(needs <= has ? "" : fmt::format("{} {}", needs, has), "memory");
      if (auto const small = std::find_if(fits.begin(), fits.end(), [](auto const& text) { return !text.empty(); });
          small != fits.end()) {
        say(fmt::format("{:>10}  {:>22}  does not fit: rank {} needs {:.3f} GB, and has {:.3f} GB", batch,
                        recomputation, small - fits.begin(), std::strtod(small->c_str(), nullptr) / 1e9,
                        std::strtod(small->c_str() + small->find(' '), nullptr) / 1e9));
        break;
      }
      auto const source = batch_source(settings, ready, world.rank(), world.size());
      Trainer<Program, C, P> trainer(mesh, settings, ready.config, source);
      auto& engine = trainer.engine();
      double const seconds = time_steps(trainer, settings).seconds;
      auto const largest_pss = largest_pss_bytes(world);
      auto const tokens = static_cast<double>(settings.gradient_accumulation_steps * batch * settings.block_size);
      auto const bytes = engine.account().reserved_total();
      say(fmt::format("{:>10}  {:>22}  {:>10.4f}  {:>10}  {:>14.3f}  {:>14.3f}", batch, recomputation, seconds,
                      with_commas(std::llround(tokens / seconds)), static_cast<double>(bytes) / 1e9,
                      static_cast<double>(largest_pss) / 1e9));
      log.write_or_fail(fmt::format(
          R"({{"batch_size":{},"{}":"{}","ranks":{},"device":"{}","dtype":"{}","time_s":{:.17g},"tokens_per_s":{:.17g},)"
          R"("bytes":{},"pss_bytes_max":{}}})",
          batch, setting, recomputation, world.size(), job.device, job.dtype, seconds, tokens / seconds, bytes,
          largest_pss));
    }
  }
  return EXIT_SUCCESS;
}

}  // namespace transformer
