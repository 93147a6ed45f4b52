// SPDX-License-Identifier: Apache-2.0
// Training on one rank, in the order of nanoGPT's train.py: batches, engine, model and optimizer; a step; an
// evaluation; the loop. nanogpt and llama share this file. Settings are in run/settings.hpp. Saving, logging and
// signals are calls of Session (training/session.hpp).
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/fsdp.hpp"
#include "fsdp/host.hpp"
#include "transformer/data/batch_source.hpp"
#include "transformer/data/dataset.hpp"
#include "transformer/run/choices.hpp"
#include "transformer/training/engine_options.hpp"

namespace transformer {

/// Batches, engine, model and optimizer of one rank.
/// @tparam Program_  a model and its files: [Note: What a program is] in training/rank.hpp
/// @tparam C  communicator
/// @tparam P  precision: fp32, or bf16 parameters and activations with fp32 gradients and fp32 master weights
template <class Program_, fsdp::Communicator C, class P = fsdp::Fp32>
class Trainer {
 public:
  using Program = Program_;
  using Config = typename Program::Config;
  using Engine = fsdp::Engine<C, P>;
  using Model = typename Program::template Model<Engine>;  // Gpt or Llama
  using Device = typename C::Device;
  using Element = typename P::Param;
  /// True on a GPU: the host prepares the next step while the device computes. False on the host, where both would
  /// compete for the cores.
  static constexpr bool runs_ahead = !std::is_same_v<Device, fsdp::host::Device>;
  /// Whether compute streams count the time that they wait.
  static constexpr bool counts_waits = requires(Engine & engine) { engine.compute().blocked_ns(fsdp::WaitSite::none); };

  /// The constructor of the model shards its layers; that of the optimizer seals the engine, which allocates
  /// shards, gradients, moments and buffers.
  /// @note Collective: every rank must call it.
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

  /// One optimizer step: micro-steps, clipping, AdamW.
  /// @param want_loss  if false, a device that runs ahead is not waited for, and the result is nullopt
  /// @note Stream: waits for compute if the loss is read; else only where the buffers of tokens are still in use.
  /// @return this rank's loss; its mean over ranks is the loss of the step
  /// @note Collective: every rank must call it.
  std::optional<double> step(std::int64_t iteration, double learning_rate, bool want_loss) {
    auto const micro_steps = source_.micro_steps();  // of each rank: gradient_accumulation_steps / ranks, rounded up
    auto const weight =
        source_.training_weight(iteration);  // ranks / gradient_accumulation_steps; rows of text count by their tokens
    for (std::int64_t micro = 0; micro < micro_steps; ++micro) {
      // While no_sync lives, backward reduces no gradients. Gradients that are not sharded are reduced in the last
      // micro-step alone, as in DDP.
      auto const no_sync = engine_.no_sync(!engine_.strategy().shards && micro + 1 < micro_steps);
      source_.read_training_batch(iteration, micro, inputs_, targets_);
      model_.set_dropout_masks(static_cast<std::uint64_t>(iteration), source_.first_of(micro));
      // Enqueues forward and backward: gathers each layer's parameters before it, and reduces its gradients after it. A
      // rank without sequences takes part with weight 0.
      model_.forward_backward(inputs_.data(), targets_.data(), source_.has_sequences(micro) ? weight : 0.0);
      if (watcher_ && micro + 1 < micro_steps) watcher_(true, micro + 1, micro_steps);
    }
    // The norm is computed on the device, over all ranks. AdamW multiplies by the factor that clips, and skips the step
    // if the norm is not finite. An empty norm clips nothing.
    fsdp::GradNorm<Engine> norm;
    if (settings_.grad_clip > 0) norm = fsdp::clip_grad_norm(engine_, static_cast<float>(settings_.grad_clip));
    adamw_.step(static_cast<float>(learning_rate), norm);  // afterwards gradients are fresh: there is no zero_grad
    if (!want_loss && runs_ahead) {
      model_.discard_loss();
      return std::nullopt;
    }
    auto const loss = model_.read_loss();
    gradient_norm_ = settings_.grad_clip > 0 ? norm.value() : -1;
    if (!std::isfinite(gradient_norm_)) skipped_steps_ = norm.skipped();
    return loss;
  }
  double step(std::int64_t iteration, double learning_rate) { return *step(iteration, learning_rate, true); }
  /// The gradients' norm before clipping, of the last step whose loss was read. -1: nothing is clipped, nor measured.
  double gradient_norm() const { return gradient_norm_; }
  /// Steps that the optimizer has skipped so far. Updated when a norm that is not finite is read.
  std::int64_t skipped_steps() const { return skipped_steps_; }

  /// Mean losses of both splits over eval_iters batches of every rank, without dropout.
  /// @param stops  called between batches: whether to leave the evaluation, the same on every rank
  /// @return nullopt if it was left
  /// @note Collective: every rank must call it.
  template <class Stops>
  std::optional<std::array<double, 2>> evaluate(std::int64_t iteration, Stops&& stops) {
    std::vector<double> losses;
    for (auto const split : {Split::train, Split::val}) {
      auto const first = iteration * settings_.eval_iters;
      auto const weight = source_.evaluation_weight(split, first, settings_.eval_iters);
      for (std::int64_t k = 0; k < settings_.eval_iters; ++k) {
        source_.read_evaluation_batch(split, first + k, inputs_, targets_);
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

  /// Called between the micro-steps of a step, and after each batch of an evaluation: `done` of `of` have been
  /// enqueued.
  using Watcher = std::function<void(bool training, std::int64_t done, std::int64_t of)>;
  void watch(Watcher watcher) { watcher_ = std::move(watcher); }

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

/// The loop: until max_iters, or until a signal asks any rank to stop. Every rank calls it.
/// @param session  Session
/// @return the exit code of the process
template <class T, class S>
int train(T& trainer, Settings const& settings, S& session) {
  auto const schedule = learning_rate_schedule(settings);
  // The last iteration is max_iters. With eval_only the first evaluation ends the loop.
  for (std::int64_t iteration = session.begin_run(); session.begin_iteration(iteration); ++iteration) {
    double const learning_rate = schedule.at(iteration);
    if (session.evaluation_is_due()) {
      session.begin_evaluation();
      auto const losses = trainer.evaluate(iteration, [&] { return session.should_leave_evaluation(); });
      if (!losses) return session.save_and_stop();
      session.report_evaluation(*losses, learning_rate);
      if (settings.eval_only) return session.end_after_evaluation();
    }
    // A checkpoint, from which a run resumes; weights; a snapshot in memory; a sample of text.
    session.save_what_is_due();
    session.begin_step();
    auto const loss = trainer.step(iteration, learning_rate, session.wants_loss());
    session.report_step(loss, learning_rate);
    if (session.is_asked_to_stop()) return session.save_and_stop();
  }
  return session.save_and_finish();
}

}  // namespace transformer
