// SPDX-License-Identifier: Apache-2.0
// Strategy and options of engine, optimizer and decoder that the settings ask for.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "fsdp/engine.hpp"
#include "fsdp/offload.hpp"
#include "fsdp/optimizers.hpp"
#include "fsdp/options.hpp"
#include "fsdp/strategy.hpp"
#include "transformer/layers/options.hpp"
#include "transformer/run/choices.hpp"
#include "transformer/run/table.hpp"

namespace transformer {

/// The strategy that the settings name.
/// @pre check_together() has accepted them
inline fsdp::ShardingStrategy strategy_of(Settings const& settings) {
  bool const drops = resharding(settings).drops;
  if (settings.strategy == "hybrid_shard") {
    auto const group = static_cast<int>(settings.shard_group);
    if (drops) return fsdp::HybridShard<fsdp::FullShard>{.group = group};
    return fsdp::HybridShard<fsdp::ShardGradOp>{.group = group};
  }
  if (settings.strategy == "full_shard" && drops) return fsdp::FullShard{};
  if (settings.strategy == "full_shard" || settings.strategy == "shard_grad_op") return fsdp::ShardGradOp{};
  return fsdp::NoShard{};  // no_shard, ddp
}

inline fsdp::EngineOptions engine_options(Settings const& settings) {
  fsdp::EngineOptions options;
  options.prefetch = static_cast<int>(settings.prefetch);
  options.reshard_ranks = static_cast<int>(resharding(settings).ranks);
  options.bucket_bytes = std::max<std::int64_t>(1, std::llround(settings.bucket_mb * 1048576.0));
  options.first_bucket_bytes = std::min(options.first_bucket_bytes, options.bucket_bytes);
  options.seed = static_cast<std::uint64_t>(settings.seed);
  // Whole gradients wait for the last micro-step: in the shard, or if its place is in host memory, in a slot.
  options.allow_no_sync = offloaded(settings, true).gradients && !strategy_of(settings).shards;
  if (summed_in(settings) == "bfloat16") options.reduce_dtype = fsdp::DType::bf16;
  return options;
}

inline fsdp::AdamWOptions adamw_options(Settings const& settings) {
  fsdp::AdamWOptions options;
  options.lr = static_cast<float>(settings.learning_rate);
  options.beta1 = static_cast<float>(settings.beta1);
  options.beta2 = static_cast<float>(settings.beta2);
  options.weight_decay = static_cast<float>(settings.weight_decay);
  return options;
}

/// Options of a decoder that is trained. @param layer_parameters  parameters of a layer
template <class Device>
DecoderOptions decoder_options(Settings const& settings, std::int64_t layer_parameters) {
  auto options = decoder_options<Device>();
  options.seed = static_cast<std::uint64_t>(settings.seed);
  options.recompute = checkpointed_layers(settings);
  options.unit_layers = layers_in_unit(settings, layer_parameters);
  options.segment = segment_layers(settings, options.unit_layers);
  options.tuning = tuning_of(settings);
  return options;
}

/// Offloads the state that the settings name to host memory. Comes before the engine's optimizer.
/// @return the engine
template <class C, class P>
fsdp::Engine<C, P>& offloading(fsdp::Engine<C, P>& engine, Settings const& settings) {
  auto const choice = offloaded(settings, !std::is_same_v<typename P::Master, typename P::Param>);
  if (choice.any())
    fsdp::offload(engine, {.moments = choice.moments, .masters = choice.masters, .gradients = choice.gradients});
  return engine;
}

}  // namespace transformer
