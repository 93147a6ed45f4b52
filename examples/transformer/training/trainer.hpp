// SPDX-License-Identifier: Apache-2.0
// One rank's model, optimizer and batches: a training step, and the loss of an evaluation.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/fsdp.hpp"
#include "fsdp/host.hpp"
#include "fsdp/offload.hpp"
#include "transformer/data/batch_source.hpp"
#include "transformer/data/dataset.hpp"
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

/// @tparam Program  see [Note: What a program is]
/// @tparam C  communicator
/// @tparam P  precision: fp32, or narrow parameters and activations with fp32 reduction and fp32 master weights
template <class Program_, fsdp::Communicator C, class P = fsdp::Fp32>
class Trainer {
 public:
  using Program = Program_;
  using Config = typename Program::Config;
  using Engine = fsdp::Engine<C, P>;
  using Model = typename Program::template Model<Engine>;
  using Device = typename C::Device;
  using Element = typename P::Param;
  /// Whether steps may be under way on the device while the host prepares the next: not on the host, where both share
  /// the cores.
  static constexpr bool runs_ahead = !std::is_same_v<Device, fsdp::host::Device>;
  /// Whether compute streams count the time that they wait.
  static constexpr bool counts_waits = requires(Engine & engine) { engine.compute().blocked_ns(fsdp::WaitSite::none); };

  /// @note Collective: yes: the engine is sealed here.
  Trainer(fsdp::Mesh<C>& mesh, Settings const& settings, Config const& config, BatchSource const& source)
      : settings_(settings),
        config_(config),
        source_(source),
        inputs_(static_cast<std::size_t>(settings.batch_size * settings.block_size)),
        targets_(inputs_.size()),
        engine_(mesh, strategy_of(settings), engine_options(settings)),
        model_(engine_, config_, settings.batch_size, settings.block_size,
               decoder_options<Device>(settings, config_.layer_parameters())),
        adamw_(offloading(engine_, settings), adamw_options(settings)) {}
  Trainer(Trainer const&) = delete;
  Trainer& operator=(Trainer const&) = delete;

  /// Called during passes: `done` of `of` have been enqueued.
  using Watcher = std::function<void(bool training, std::int64_t done, std::int64_t of)>;
  void watch(Watcher watcher) { watcher_ = std::move(watcher); }

  /// One optimizer step.
  /// @param want_loss  false: a device that runs ahead is not waited for
  /// @return this rank's part of the loss, if it was waited for: the loss is the mean over ranks
  /// @note Stream: waits for compute at the end if the loss is read; otherwise only where TokenFeed does.
  /// @note Collective: yes.
  std::optional<double> step(std::int64_t iteration, double learning_rate, bool want_loss) {
    auto const micro_steps = source_.micro_steps();
    auto const weight = source_.training_weight(iteration);
    for (std::int64_t micro = 0; micro < micro_steps; ++micro) {
      // Sharded gradients are reduced in every micro-step; whole ones wait for the last.
      auto const waits = engine_.no_sync(!engine_.strategy().shards && micro + 1 < micro_steps);
      source_.training(iteration, micro, inputs_, targets_);
      model_.set_masks(static_cast<std::uint64_t>(iteration), source_.first_of(micro));
      model_.forward_backward(inputs_.data(), targets_.data(), source_.has_sequences(micro) ? weight : 0.0);
      if (watcher_ && micro + 1 < micro_steps) watcher_(true, micro + 1, micro_steps);
    }
    fsdp::GradNorm<Engine> norm;
    if (settings_.grad_clip > 0) norm = fsdp::clip_grad_norm(engine_, static_cast<float>(settings_.grad_clip));
    adamw_.step(static_cast<float>(learning_rate), norm);
    if (want_loss || !runs_ahead) {
      auto const loss = model_.read_loss();
      gradient_norm_ = settings_.grad_clip > 0 ? norm.value() : -1;
      if (!std::isfinite(gradient_norm_)) skipped_steps_ = norm.skipped();
      return loss;
    }
    model_.discard_loss();
    return std::nullopt;
  }
  double step(std::int64_t iteration, double learning_rate) { return *step(iteration, learning_rate, true); }
  /// The gradients' norm before clipping, of the last step whose loss was read. -1: nothing is clipped, nor measured.
  double gradient_norm() const { return gradient_norm_; }
  /// Steps that the optimizer has skipped so far, when a norm that was not finite was last read.
  std::int64_t skipped_steps() const { return skipped_steps_; }

  /// Mean losses of both splits over eval_iters batches of every rank.
  /// @param stops  called between batches: whether to leave the evaluation, the same on every rank
  /// @return nullopt if it was left
  /// @note Collective: yes: every rank takes part.
  template <class Stops>
  std::optional<std::array<double, 2>> evaluate(std::int64_t iteration, Stops&& stops) {
    std::vector<double> losses;
    for (auto const split : {Split::train, Split::val}) {
      auto const first = iteration * settings_.eval_iters;
      auto const weight = source_.evaluation_weight(split, first, settings_.eval_iters);
      for (std::int64_t k = 0; k < settings_.eval_iters; ++k) {
        source_.evaluation(split, first + k, inputs_, targets_);
        model_.evaluate(inputs_.data(), targets_.data(), weight);
        if (watcher_)
          watcher_(false, k + 1 + (split == Split::val ? settings_.eval_iters : 0), 2 * settings_.eval_iters);
        if (stops()) return std::nullopt;
      }
      losses.push_back(model_.read_evaluation());
    }
    auto const mean = engine_.mean_over_ranks(losses);
    return std::array{mean[0], mean[1]};
  }

  Engine& engine() { return engine_; }
  Model& model() { return model_; }
  fsdp::AdamW<Engine>& optimizer() { return adamw_; }
  Config const& config() const { return config_; }
  Tuning tuning() const { return tuning_of(settings_); }
  BatchSource const& source() const { return source_; }

  /// Nanoseconds that compute has waited for communication so far. Where the device counts them.
  std::uint64_t blocked_ns() const {
    std::uint64_t sum = 0;
    if constexpr (counts_waits) {
      for (std::size_t site = 1; site < static_cast<std::size_t>(fsdp::WaitSite::count_); ++site)
        sum += const_cast<Engine&>(engine_).compute().blocked_ns(static_cast<fsdp::WaitSite>(site));
    }
    return sum;
  }

 private:
  /// Offloads the state that the settings name to host memory. @return the engine
  static Engine& offloading(Engine& engine, Settings const& settings) {
    auto const choice = offloaded(settings, !std::is_same_v<typename P::Master, typename P::Param>);
    if (choice.any())
      fsdp::offload(engine, {.moments = choice.moments, .masters = choice.masters, .gradients = choice.gradients});
    return engine;
  }

  Settings settings_;
  Config config_;
  BatchSource source_;
  std::vector<std::int32_t> inputs_, targets_;
  Engine engine_;
  Model model_;
  fsdp::AdamW<Engine> adamw_;
  double gradient_norm_ = -1;
  std::int64_t skipped_steps_ = 0;
  Watcher watcher_;
};

}  // namespace transformer
