// SPDX-License-Identifier: Apache-2.0
// Values derived from several settings: recomputed layers, units, sharding, trained tensors.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/program.hpp"
#include "transformer/run/learning_rate.hpp"
#include "transformer/run/settings.hpp"
#include "transformer/tuning/tuning.hpp"

namespace transformer {

/// The parts of a text between commas.
std::vector<std::string> words_of(std::string_view text);
/// Layers whose activations backward computes again: n_layer, 0, or as many as the setting says.
std::int64_t checkpointed_layers(Settings const& settings);
/// @param has_masters  parameters are narrower than fp32
/// @throws fsdp::ConfigError if `offload` names something else, or masters that there are not
fsdp::Offloaded offloaded(Settings const& settings, bool has_masters);
/// recompute_segment: number of those layers that are computed again together, from the input of the first.
/// @param unit_layers  see layers_in_unit
/// @throws fsdp::ConfigError if there are no such layers, or fewer, or if segments would cut units
std::int64_t segment_layers(Settings const& settings, std::int64_t unit_layers);
/// learning_rate, min_lr, warmup_iters, lr_decay_iters (0: max_iters), decay_lr and lr_schedule.
inline LearningRate learning_rate_schedule(Settings const& settings) {
  return {.highest = settings.learning_rate,
          .lowest = settings.min_lr,
          .warmup = settings.warmup_iters,
          .end = settings.lr_decay_iters > 0 ? settings.lr_decay_iters : settings.max_iters,
          .decays = settings.decay_lr,
          .linear = settings.lr_schedule == "linear"};
}
/// The tensors that train, by lora_rank, lora_alpha, lora_targets and freeze_layers.
Tuning tuning_of(Settings const& settings);
/// reshard_after_forward: the state of a unit after its forward.
struct Resharding {
  bool drops = true;       ///< false: it stays until after backward
  std::int64_t ranks = 0;  ///< above 0: it stays sharded over this many ranks
};
/// @throws fsdp::ConfigError if the setting says nothing, or does not go with the strategy
Resharding resharding(Settings const& settings);
/// Neighbouring layers that share a unit, as wrap and min_params say; 0: all, with embeddings and head.
/// @param layer_parameters  parameters of a layer
std::int64_t layers_in_unit(Settings const& settings, std::int64_t layer_parameters);
/// reduce_dtype: what ranks sum gradients in.
inline std::string_view summed_in(Settings const& settings) {
  return settings.reduce_dtype.empty() ? "float32" : std::string_view(settings.reduce_dtype);
}
/// Notes on given settings that have no effect, or another effect than their names suggest.
/// @param ranks        in the world
/// @param shares_gpus  there are fewer GPUs than processes
std::vector<std::string> notes_on(Settings const& settings, std::int64_t ranks, bool shares_gpus);

/// @throws fsdp::ConfigError if lora_rank and freeze_layers do not go together, or the model has fewer layers
void expect_tuning(Settings const& settings);

/// Checks settings that depend on each other.
/// @param ranks  ranks in the world
/// @throws fsdp::ConfigError naming the settings
void check_together(Settings const& settings, Command command, std::int64_t ranks);

}  // namespace transformer
