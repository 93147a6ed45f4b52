// SPDX-License-Identifier: Apache-2.0
// Runs that `plan --hardware` compares, and the printing of its results.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fsdp/plan.hpp"
#include "fsdp/program.hpp"
#include "transformer/data/batch_source.hpp"
#include "transformer/run/settings.hpp"

namespace transformer {

/// Bytes of a rank.
struct PlannedMemory {
  fsdp::MemoryPlan engine;
  std::int64_t activations = 0, workspace = 0, scalars = 0;

  std::int64_t total() const { return engine.reserved() + activations + workspace + scalars; }
};

/// One candidate.
struct PlannedRun {
  Settings settings;
  PlannedMemory memory;
  fsdp::plan::Forecast time{};
  double tokens_per_second = 0;  ///< of all GPUs
  double mfu = 0;
};

/// The size of a model, roughly.
struct ModelSize {
  double parameters = 0, layers = 0, width = 0, vocabulary = 0;
};
/// Refuses a plan whose bytes or tokens may not be counted in 64 bits: estimated from above, with a wide margin.
/// @throws fsdp::ConfigError with the settings to make smaller
void expect_countable(Settings const& settings, ModelSize const& model);

/// Checks and completes the settings of a plan on hardware.
/// @param settings  ranks: the GPUs. Micro-steps: one on each GPU, unless they are given
/// @throws fsdp::ConfigError if the GPUs are no whole nodes, or for what there is no time
void expect_plannable(Settings& settings, fsdp::plan::Hardware const& hardware);
/// Micro-steps of a GPU in a step; GPUs may have no sequences in the last one.
inline std::int64_t planned_micro_steps(Settings const& settings) {
  return BatchSource{.ranks = settings.ranks, .gradient_accumulation_steps = settings.gradient_accumulation_steps}
      .micro_steps();
}
/// The settings that the search may choose take all these values in turn, unless they were given: strategies, shard
/// groups that are whole nodes or divide one, prefetch 1 to 3, recomputation of no and of all layers, and batch_sizes.
/// no_shard is left out where its parameters, gradients and moments alone do not fit. What contradicts given settings
/// is left out.
/// @param parameters  of the model
/// @throws fsdp::ConfigError if nothing is left
std::vector<Settings> candidates(Settings const& base, fsdp::plan::Hardware const& hardware, std::int64_t parameters);
/// @return the exit code: 1 if nothing fits
int print_planned_runs(std::vector<PlannedRun> const& runs, fsdp::plan::Hardware const& hardware);

}  // namespace transformer
