// SPDX-License-Identifier: Apache-2.0
// Training beside its computations: checkpoints, logs, progress, samples, traces, signals.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/communicator.hpp"
#include "fsdp/error.hpp"
#include "fsdp/finite_state.hpp"
#include "fsdp/host.hpp"
#include "transformer/launch/job.hpp"
#include "transformer/launch/process.hpp"
#include "transformer/launch/program.hpp"
#include "transformer/launch/stop_vote.hpp"
#include "transformer/math/peak.hpp"
#include "transformer/report/jump_watch.hpp"
#include "transformer/report/log_lines.hpp"
#include "transformer/report/metrics.hpp"
#include "transformer/report/progress.hpp"
#include "transformer/run/choices.hpp"
#include "transformer/run/table.hpp"
#include "transformer/run/trace_window.hpp"
#include "transformer/training/files.hpp"
#include "transformer/training/preparation.hpp"
#include "transformer/training/samples.hpp"
#include "transformer/training/skipped_steps.hpp"
#include "transformer/training/state.hpp"

namespace transformer {

/// Checkpoints, logs, samples and signals of a run. train() calls it on every rank, at fixed places of an iteration.
/// Errors that end the run are thrown on every rank; if one rank alone sees an error (a training loss that is not
/// finite), the others get a PeerError.
/// @tparam T  Trainer
template <class T>
class Session {
 public:
  Session(T& trainer, Job const& job, Preparation<typename T::Program> const& ready, JsonLog& log, LogFile& run_log,
          JsonLog& trace)
      : trainer_(trainer),
        settings_(job.settings),
        ready_(ready),
        dtype_(job.dtype),
        first_rank_(trainer.engine().rank() == 0),
        tokens_(static_cast<double>(settings_.tokens_per_step())),
        peak_(ready.peak),
        meter_(tokens_ * T::Program::flop_per_token(ready.config, settings_), peak_.flops),
        progress_(first_rank_, settings_.max_iters),
        log_(log),
        run_log_(run_log),
        trace_(trainer, settings_, trace, ready.resumed ? ready.resumed->iteration : 0),
        samples_(trainer, settings_, ready),
        files_(trainer, settings_, ready, run_, progress_, log, run_log) {
    run_.model = T::Program::model_text(ready.config);
    if (ready.dataset && !ready.dataset->meta.path.empty()) run_.data_vocab_size = ready.dataset->meta.vocab_size;
    if (!first_rank_) return;
    trainer_.watch([this](bool training, std::int64_t done, std::int64_t of) {
      progress_.within(training ? "training" : "evaluating", done, of, training ? "micro-steps" : "batches");
    });
  }
  Session(Session const&) = delete;
  Session& operator=(Session const&) = delete;
  ~Session() { trainer_.watch({}); }

  /// Begins the run, or goes on from the checkpoint that has been loaded.
  /// @return the first iteration
  std::int64_t begin_run() {
    if (ready_.resumed) resume();
    run_.vocabulary = ready_.vocabulary;
    run_.data = ready_.data;
    run_.base = ready_.base;
    run_.origin = ready_.origin;
    run_.dtype = dtype_;
    auto const lineage = lineage_of(run_);
    run_.start = run_id();
    if (files_.takes_snapshots()) run_.lineage = lineage.empty() ? run_.start : lineage;
    first_ = run_.iteration;
    progress_.begin(first_);
    began_ = Clock::now();
    return first_;
  }

  /// Begins an iteration; ends the process if a second signal has asked for it.
  /// @return false behind the last iteration
  bool begin_iteration(std::int64_t iteration) {
    if (iteration > settings_.max_iters && !settings_.eval_only) return false;
    current_iteration.store(iteration, std::memory_order_relaxed);
    stop_if_asked();
    run_.iteration = iteration;
    evaluated_now_ = better_ = false;
    return true;
  }

  bool evaluation_is_due() const {
    return (run_.iteration % settings_.eval_interval == 0 && run_.evaluated != run_.iteration) || settings_.eval_only;
  }
  void begin_evaluation() {
    trace_.pause();
    write_iterations();
    files_.look_after_save();
    evaluation_began_ = Clock::now();
  }
  /// Between batches: a rank was asked to stop. @note Collective: yes, at times.
  bool should_leave_evaluation() { return evaluation_vote_.stops(trainer_.engine()); }
  /// Prints and logs the losses of both splits, and notes whether they are the best so far.
  void report_evaluation(std::array<double, 2> const& losses, double rate);
  int end_after_evaluation() { return stop_after(run_.iteration, "eval_only", EXIT_SUCCESS); }

  /// Before a step: the sample, checkpoint, weights and snapshot that are due.
  void save_what_is_due() {
    auto const iteration = run_.iteration;
    if (iteration > first_ && samples_.is_due(iteration)) sample(iteration);
    if ((iteration > first_ && files_.is_checkpoint_due(iteration)) || (better_ && iteration > 0)) {
      expect_finite_state();
      files_.save_checkpoint(better_);
    }
    if (evaluated_now_) files_.save_evaluated_weights();
    if (iteration > first_ && files_.is_snapshot_due(iteration)) files_.take_snapshot();
  }

  void begin_step() {
    trace_.before_step(run_.iteration);
    step_began_ = Clock::now();
  }
  /// Whether the step is to read its loss. Where the device runs ahead of the host, losses are read when they are
  /// logged, and before evaluations and the end: what is logged, timed and saved there has all steps behind it.
  bool wants_loss() const {
    auto const iteration = run_.iteration;
    return iteration % settings_.log_interval == 0 || (iteration + 1) % settings_.eval_interval == 0 ||
           files_.is_checkpoint_due(iteration + 1) || files_.is_snapshot_due(iteration + 1) ||
           samples_.is_due(iteration + 1) || iteration == settings_.max_iters;
  }
  /// Logs the step. @param loss  this rank's part, if it was read
  void report_step(std::optional<double> loss, double rate);

  /// After a step: a rank was asked to stop. @note Collective: yes, at times.
  bool is_asked_to_stop() { return run_.iteration < settings_.max_iters && vote_.stops(trainer_.engine()); }

  /// Saves and ends a run that was asked to stop: whoever starts it again goes on from here.
  /// @return the exit code
  int save_and_stop() {
    stop_if_asked();  // a second signal has come: nothing is saved
    if (trained_ == 0) {
      progress_.say("asked to stop: nothing was trained since the start, and nothing is saved");
      return stop_after(run_.iteration, "asked to stop", saved_and_stopped);
    }
    run_.iteration = trained_;
    expect_finite_state();
    if (!files_.save_last_checkpoint([&] { stop_if_asked(); })) return stop_unsaved();
    auto const text = fmt::format("asked to stop: saved in {} before iteration {}; continue with --init_from=resume",
                                  settings_.out_dir, trained_);
    progress_.say(text);
    if (launcher_ends_run && first_rank_) fmt::print(stderr, "{}: {}\n", program_name, text);
    return stop_after(trained_, "asked to stop", saved_and_stopped);
  }

  /// Saves and ends a run that has reached max_iters.
  /// @return the exit code
  int save_and_finish() {
    if (trained_ == 0) {
      progress_.say(
          fmt::format("nothing to do: the run is at iteration {}, and max_iters is {}", first_, settings_.max_iters));
      return stop_after(first_, "nothing to do", EXIT_SUCCESS);
    }
    run_.iteration = trained_;
    expect_finite_state();
    bool const saved = files_.save_last_checkpoint([&] { stop_if_asked(); });
    bool const exported = files_.save_last_weights([&] { stop_if_asked(); });
    return saved && exported ? stop_after(trained_, "max_iters", EXIT_SUCCESS) : stop_unsaved();
  }

  /// Logs the error that ends the run.
  void log_error(std::string_view what) { run_log_.write(log_line_of_stop(trained_, what)); }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::size_t most_unwritten = 1000;
  static double seconds(Clock::time_point from, Clock::time_point to) {
    return std::chrono::duration<double>(to - from).count();
  }

  void stop_if_asked() {
    if (!fsdp::host::termination_requested()) return;
    run_log_.write(log_line_of_stop(trained_, fsdp::host::termination_cause()));
    std::fflush(stdout);
    std::_Exit(fsdp::host::wait_terminated_exit_code);
  }

  /// Lets the model write, into the output and the log. @note Collective: yes.
  void sample(std::int64_t iteration) {
    trace_.pause();
    write_iterations();
    auto const text = samples_.write(iteration, [&](std::int64_t done) {
      if (first_rank_) progress_.within("sampling", done, settings_.sample_tokens, "tokens");
    });
    if (!first_rank_) return;
    progress_.say(fmt::format("sample before iteration {}:\n{}\n---------------", iteration, text));
    run_log_.write(log_line_of_sample(iteration, text));
  }

  /// Measures the peak of the host's ranks once more, unless it was given, where it takes 2 % of an evaluation or less,
  /// and keeps the higher.
  /// @param evaluation  seconds that it has taken
  /// @note Collective: yes; one exchange.
  void look_for_peak(double evaluation) {
    using World = std::remove_reference_t<decltype(trainer_.engine().world())>;
    if constexpr (measures_peak_again<World>) {
      auto& world = trainer_.engine().world();
      double const before = peak_.flops;
      using E = typename T::Element;
      bool const measures = evaluation >= 2.5 && settings_.peak_tflops == 0;
      if (!raise(peak_, world, measures ? measure_host_rate<E>(world.device()) : 0)) return;
      meter_.set_peak(peak_.flops);
      if (!settings_.verbose || meter_.peak() > peak_.flops) return;
      progress_.say(
          fmt::format("{} peak measured again: {:.1f} GFLOP/s a rank instead of {:.1f} (mfu is relative to it)",
                      host_products<E>, peak_.flops / world.size() / 1e9, before / world.size() / 1e9));
    }
  }

  /// Prints one note if a step exceeds the peak. For a measured peak, only with --verbose.
  void note_on_peak(std::int64_t iteration) {
    if (noted_peak_ || meter_.peak() <= peak_.flops) return;
    noted_peak_ = true;
    if (peak_.is_measured && !settings_.verbose) return;
    double const ranks = trainer_.engine().world().size();
    progress_.say(
        fmt::format("note: iteration {} reached {:.1f} GFLOP/s a rank, above the {} of {:.1f}; mfu is relative to the "
                    "higher rate",
                    iteration, meter_.peak() / ranks / 1e9, peak_.source, peak_.flops / ranks / 1e9));
  }

  /// Logs the iteration that was read last.
  /// @param local  its number, counted from this process's first
  void report(std::int64_t local) {
    meter_.add(local, unwritten_.back().seconds);
    auto report = write_iterations();
    report.mfu = meter_.value();
    progress_.say(line(report));
    log_.write(json(report));
    files_.look_after_save();
  }

  /// Writes the iterations since the last call to the run's log, with the mean of their losses over the ranks.
  /// @return the last, if there is one
  /// @note Collective: yes; one exchange, whatever their number.
  IterationReport write_iterations() {
    if (unwritten_.empty()) return {};
    std::vector<double> losses;
    for (auto const& report : unwritten_) losses.push_back(report.loss);
    auto const means = trainer_.engine().mean_over_ranks(losses);
    for (std::size_t i = 0; i < means.size(); ++i) {
      unwritten_[i].loss = means[i];
      if (!first_rank_) continue;
      run_log_.write(log_line(unwritten_[i]));
      watch(unwritten_[i]);
    }
    auto const last = unwritten_.back();
    unwritten_.clear();
    return last;
  }

  /// Says so if the loss or the gradients' norm of an iteration stands far above those before it.
  void watch(IterationReport const& report) {
    auto const say = [&](std::optional<Jump> const& jump, std::string_view name, std::string_view what) {
      if (!jump) return;
      progress_.say(text_of(*jump, name));
      run_log_.write(log_line(*jump, what));
    };
    say(losses_.add(report.iteration, report.loss), "loss", "loss");
    if (report.gradient_norm == -1) return;
    if (std::isfinite(report.gradient_norm)) {
      say(norms_.add(report.iteration, report.gradient_norm), "gradient norm", "grad_norm");
      return;
    }
    progress_.say(fmt::format("warning: iteration {}: the gradient norm is {}; the optimizer skipped this step",
                              report.iteration, loss_text(report.gradient_norm)));
    run_log_.write(log_line_of_skipped_step(report.iteration));
  }

  /// Writes every rank's memory to the run's log. @note Collective: yes; rank 0 receives a line of every rank.
  void write_memory(std::int64_t iteration) {
    auto& engine = trainer_.engine();
    std::string text;  // rank 0's
    static_cast<void>(fsdp::comm::ask_first_rank(engine.world(), pack(rank_memory(engine.account())), "memory",
                                                 [&](std::vector<std::string> const& ranks) {
                                                   text = log_line_of_memory(iteration, ranks);
                                                   return std::string();
                                                 }));
    if (first_rank_) run_log_.write(text);
  }
  std::int64_t reserved() const { return trainer_.engine().account().reserved_total(); }

  /// Writes what is left to write. @return `code` @note Collective: yes.
  int stop_after(std::int64_t iteration, std::string_view why, int code) {
    write_iterations();
    write_memory(iteration);
    run_log_.write(log_line_of_stop(iteration, why));
    return code;
  }

  /// Goes on from the checkpoint that has been loaded.
  void resume() {
    run_ = *ready_.resumed;
    run_.model = T::Program::model_text(ready_.config);
    files_.resume();
    progress_.say(fmt::format("resuming from {} at iteration {}", run_.checkpoint.string(), run_.iteration));
  }

  /// Ends a run whose last files could not be written.
  int stop_unsaved() {
    if (first_rank_) files_.report_lost();
    return stop_after(trained_, "files could not be written", EXIT_FAILURE);
  }

  /// Before a save: a state that training could not go on from replaces no checkpoint.
  /// @throws fsdp::Error on every rank if a weight or a part of the optimizer's state is not finite
  /// @note Collective: yes; each rank looks at its own part.
  void expect_finite_state() {
    auto& engine = trainer_.engine();
    auto const found = fsdp::checkpoint::find_not_finite(engine, trainer_.optimizer());
    if (!found.empty())
      fsdp::fail<fsdp::Error>(
          "rank {}: iteration {}: the step left an infinity or NaN in {}; this state was not saved, and training stops",
          engine.rank(), run_.iteration - 1, found);
  }

  /// @param taken  steps of this start, the last one too
  /// @throws fsdp::Error on every rank if the last steps, or all of a run that ends here, were skipped
  void expect_steps(std::int64_t taken) {
    auto const row = skipped_.in_a_row();
    bool const all = row == taken && trained_ > settings_.max_iters;
    if (row == 0 || (row < settings_.max_skipped_steps && !all)) return;
    write_iterations();
    fsdp::fail<fsdp::Error>(
        "rank {}: iteration {}: the gradient norm was not finite in {} iteration{} in a row, whose steps were skipped; "
        "training stops. Continue from an earlier checkpoint with a lower learning_rate, or begin with other weights",
        trainer_.engine().rank(), trained_ - 1, row, row == 1 ? "" : "s");
  }

  T& trainer_;
  Settings const& settings_;
  Preparation<typename T::Program> const& ready_;
  std::string dtype_;  ///< that is computed in
  bool first_rank_;
  double tokens_;
  Peak peak_;
  MfuMeter meter_;
  bool noted_peak_ = false;
  Progress progress_;
  JsonLog& log_;
  LogFile& run_log_;
  TraceWindow<T> trace_;
  RunState run_;
  TrainingSamples<T> samples_;
  static constexpr double vote_every = T::runs_ahead ? 1.0 : 0.1;
  StopVote vote_{vote_every}, evaluation_vote_{vote_every};
  RunFiles<T> files_;
  double span_ = 0;                         ///< seconds that iterations have taken since a loss was read
  std::int64_t spanned_ = 0;                ///< how many
  std::vector<IterationReport> unwritten_;  ///< read since the run's log was last written; losses are this rank's
  JumpWatch losses_{1.2}, norms_{5};        ///< rank 0's
  SkippedSteps skipped_;
  double last_loss_ = 0;
  std::int64_t first_ = 0;  ///< iteration of this process
  Clock::time_point began_, evaluation_began_, step_began_;
  bool evaluated_now_ = false, better_ = false;  ///< in this iteration; its evaluation is the best so far
  std::int64_t trained_ = 0;                     ///< optimizer steps of the run, once this process has done one
};

template <class T>
void Session<T>::report_evaluation(std::array<double, 2> const& losses, double rate) {
  auto const iteration = run_.iteration;
  auto const [train_loss, val_loss] = losses;
  look_for_peak(seconds(evaluation_began_, Clock::now()));
  run_.evaluated = iteration;
  run_.train_loss = train_loss;
  run_.val_loss = val_loss;
  EvaluationReport const report{iteration, train_loss, val_loss, rate, meter_.value()};
  progress_.say(line(report));
  log_.write(json(report));
  run_log_.write(log_line(report));
  if (trained_ > 0) write_memory(iteration);
  if (!std::isfinite(train_loss) || !std::isfinite(val_loss)) {
    auto const found = fsdp::checkpoint::find_not_finite(trainer_.engine(), trainer_.optimizer());
    fsdp::fail<fsdp::Error>(
        "rank {}: iteration {}: the evaluation gives a training loss of {} and a validation loss of {}, and {}; "
        "training stops",
        trainer_.engine().rank(), iteration, loss_text(train_loss), loss_text(val_loss),
        found.empty()   ? std::string("the weights that train are finite")
        : trained_ == 0 ? fmt::format("{} are not finite at the start", found)
                        : fmt::format("{} are not finite after step {}", found, trained_ - 1));
  }
  evaluated_now_ = true;
  better_ = val_loss < run_.best_val_loss;
  if (better_) run_.best_val_loss = val_loss;
}

template <class T>
void Session<T>::report_step(std::optional<double> loss, double rate) {
  auto const iteration = run_.iteration;
  if (loss && !std::isfinite(*loss))
    fsdp::fail<fsdp::Error>("rank {}: iteration {}: the training loss is {}; training stops", trainer_.engine().rank(),
                            iteration, loss_text(*loss));
  auto const end = Clock::now();
  trained_ = iteration + 1;
  span_ += seconds(step_began_, end);
  ++spanned_;
  if (loss) {
    skipped_.add(trainer_.gradient_norm(), spanned_, trainer_.skipped_steps());
    double const each = std::exchange(span_, 0.0) / static_cast<double>(std::exchange(spanned_, 0));
    last_loss_ = *loss / trainer_.source().share();
    auto const mfu = meter_.of(each);
    note_on_peak(iteration);
    unwritten_.push_back({iteration, *loss, each, mfu, rate, seconds(began_, end), tokens_ / each, reserved(),
                          trainer_.gradient_norm()});
    if (iteration % settings_.log_interval == 0) report(iteration - first_);
    if (unwritten_.size() == most_unwritten) write_iterations();
    expect_steps(trained_ - first_);
  }
  if (iteration == first_) write_memory(iteration);
  if (auto const table = trace_.after_step(iteration, iteration == settings_.max_iters); !table.empty())
    progress_.say(table);
  progress_.advance(iteration, last_loss_);
}

}  // namespace transformer
