// SPDX-License-Identifier: Apache-2.0
// `bench` of several batch sizes, with and without recomputation: time of a step and memory. Larger batch sizes are
// skipped once one does not fit.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
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
#include "transformer/train.hpp"
#include "transformer/training/planned_bytes.hpp"
#include "transformer/training/preparation.hpp"

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

/// Prints the names of the columns.
void print_variants_head();
/// Prints the line of a run for which memory does not suffice.
/// @param fits  for each rank the bytes that it needs and has, or nothing if they suffice
void print_too_large(Settings const& settings, std::vector<std::string> const& fits);
/// Time and memory of one run.
struct VariantResult {
  double seconds = 0;  ///< of a step
  std::int64_t bytes = 0, largest_pss = 0;
};
/// Prints the line of a run, and writes it as a JSON object. @throws fsdp::ResourceError if the log cannot be written
void print_variant(Settings const& settings, VariantResult const& result, JsonLog& log);

/// Prints a line for each run, and writes a JSON object. Larger batch sizes are skipped once one does not fit.
/// @return the exit code
/// @note Collective: yes.
template <class Program, class P, fsdp::Communicator C>
int bench_variants(fsdp::Mesh<C>& mesh, Job const& job, Preparation<Program> const& ready, JsonLog& log) {
  auto& world = mesh.world();
  bool const first = world.rank() == 0;
  auto const variants = variants_of(job.settings, {job.settings.batch_size});
  if (first) print_variants_head();
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
      if (std::any_of(fits.begin(), fits.end(), [](auto const& text) { return !text.empty(); })) {
        if (first) print_too_large(settings, fits);
        break;
      }
      auto const source = batch_source(settings, ready, world.rank(), world.size());
      Trainer<Program, C, P> trainer(mesh, settings, ready.config, source);
      auto& engine = trainer.engine();
      auto const seconds = time_steps(trainer, settings).seconds;
      auto const largest_pss = largest_pss_bytes(world);
      if (first) print_variant(settings, {seconds, engine.account().reserved_total(), largest_pss}, log);
    }
  }
  return EXIT_SUCCESS;
}

}  // namespace transformer
