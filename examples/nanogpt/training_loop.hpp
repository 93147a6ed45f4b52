// SPDX-License-Identifier: Apache-2.0
// The training loop of one rank.
#pragma once

#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <utility>

#include "fsdp/error.hpp"
#include "fsdp/host/backoff.hpp"
#include "job.hpp"
#include "launcher.hpp"
#include "metrics.hpp"
#include "preparation.hpp"
#include "progress.hpp"
#include "saved_model.hpp"
#include "settings.hpp"
#include "trace_window.hpp"
#include "weights_file.hpp"

namespace nanogpt {

/// nanoGPT's loop: steps, evaluations, checkpoints, log lines.
/// @tparam T  Trainer
template <class T>
class TrainingLoop {
 public:
  TrainingLoop(T& trainer, Job const& job, Preparation const& ready, JsonLog& log, JsonLog& trace)
      : trainer_(trainer),
        settings_(job.settings),
        ready_(ready),
        first_rank_(trainer.engine().rank() == 0),
        tokens_(
            static_cast<double>(settings_.gradient_accumulation_steps * settings_.batch_size * settings_.block_size)),
        meter_(tokens_ * ready.config.flop_per_token(), ready.peak.flops),
        progress_(first_rank_, settings_.max_iters),
        log_(log),
        trace_(trainer, settings_, trace) {}

  void run() {
    auto const began = Clock::now();
    for (std::int64_t iteration = 0; iteration <= settings_.max_iters; ++iteration) {
      current_iteration.store(iteration, std::memory_order_relaxed);
      stop_if_asked();
      double const rate = learning_rate(settings_, iteration);
      if (iteration % settings_.eval_interval == 0) {
        trace_.pause();
        evaluate(iteration, rate);
        if (iteration == 0 && settings_.eval_only) return;
      }
      trace_.before_step(iteration);
      auto const start = Clock::now();
      auto const loss = trainer_.step(iteration, rate, wants_loss(iteration));
      if (loss && !std::isfinite(*loss))
        fsdp::fail<fsdp::Error>("rank {}: iteration {}: the training loss is {}", trainer_.engine().rank(), iteration,
                                *loss);
      auto const end = Clock::now();
      trained_ = iteration + 1;
      span_ += seconds(start, end);
      ++spanned_;
      if (loss) {
        double const each = std::exchange(span_, 0.0) / static_cast<double>(std::exchange(spanned_, 0));
        last_loss_ = *loss;
        if (iteration % settings_.log_interval == 0) report(iteration, *loss, rate, each, seconds(began, end));
      }
      if (auto const table = trace_.after_step(iteration, iteration == settings_.max_iters); !table.empty())
        progress_.say(table);
      progress_.advance(iteration, last_loss_);
    }
    if (saved_ < 0 || (settings_.always_save_checkpoint && saved_ != trained_)) save(trained_);
  }

 private:
  using Clock = std::chrono::steady_clock;
  static double seconds(Clock::time_point from, Clock::time_point to) {
    return std::chrono::duration<double>(to - from).count();
  }

  /// Where the device runs ahead of the host, losses are read when they are logged, and before evaluations and the end:
  /// what is logged, timed and saved there has all steps behind it.
  bool wants_loss(std::int64_t iteration) const {
    return iteration % settings_.log_interval == 0 || (iteration + 1) % settings_.eval_interval == 0 ||
           iteration == settings_.max_iters;
  }
  void stop_if_asked() const {
    if (!fsdp::host::termination_requested()) return;
    std::fflush(stdout);
    std::_Exit(fsdp::host::wait_terminated_exit_code);
  }

  void evaluate(std::int64_t iteration, double rate) {
    auto const [train_loss, val_loss] = trainer_.evaluate(iteration);
    state_.iteration = iteration;
    state_.train_loss = train_loss;
    state_.val_loss = val_loss;
    EvaluationReport const report{iteration, train_loss, val_loss, rate, meter_.value()};
    progress_.say(line(report));
    log_.write(json(report));
    bool const better = val_loss < best_;
    if (better) best_ = val_loss;
    if ((better || settings_.always_save_checkpoint) && iteration > 0) save(iteration);
  }

  void report(std::int64_t iteration, double loss, double rate, double time, double total) {
    double const mean = trainer_.engine().mean_over_ranks({loss})[0];
    meter_.add(iteration, time);
    IterationReport const report{iteration, mean,  time,           meter_.value(),
                                 rate,      total, tokens_ / time, trainer_.engine().account().reserved_total()};
    progress_.say(line(report));
    log_.write(json(report));
  }

  void save(std::int64_t iteration) {
    progress_.say(fmt::format("saving checkpoint to {}", settings_.out_dir));
    std::filesystem::path const folder(settings_.out_dir);
    save_weights(trainer_.engine(), folder / weights_name);
    saved_ = iteration;
    if (!first_rank_) return;
    state_.iteration = iteration;
    state_.best_val_loss = best_;
    save_model_config(folder, ready_.config, state_, settings_, ready_.dataset->meta);
  }

  T& trainer_;
  Settings const& settings_;
  Preparation const& ready_;
  bool first_rank_;
  double tokens_;
  MfuMeter meter_;
  Progress progress_;
  JsonLog& log_;
  TraceWindow<T> trace_;
  ModelState state_;
  double span_ = 0;           ///< seconds that iterations have taken since a loss was read
  std::int64_t spanned_ = 0;  ///< how many
  double last_loss_ = 0;
  double best_ = 1e9;
  std::int64_t saved_ = -1;   ///< iteration of the last checkpoint
  std::int64_t trained_ = 0;  ///< optimizer steps done
};

}  // namespace nanogpt
