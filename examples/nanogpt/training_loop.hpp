// SPDX-License-Identifier: Apache-2.0
// The training loop of one rank.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "commands.hpp"
#include "failed_saves.hpp"
#include "fsdp/checkpoint/agreement.hpp"
#include "fsdp/checkpoint/background_saver.hpp"
#include "fsdp/checkpoint/checkpoint_folder.hpp"
#include "fsdp/checkpoint/full_state.hpp"
#include "fsdp/checkpoint/save.hpp"
#include "fsdp/error.hpp"
#include "fsdp/host/backoff.hpp"
#include "job.hpp"
#include "jump_watch.hpp"
#include "launcher.hpp"
#include "metrics.hpp"
#include "peak.hpp"
#include "preparation.hpp"
#include "progress.hpp"
#include "run_log.hpp"
#include "run_state.hpp"
#include "saved_model.hpp"
#include "settings.hpp"
#include "stop_vote.hpp"
#include "trace_window.hpp"
#include "training_samples.hpp"
#include "weights_file.hpp"

namespace nanogpt {

/// nanoGPT's loop: steps, evaluations, checkpoints, log lines.
/// @tparam T  Trainer
template <class T>
class TrainingLoop {
 public:
  TrainingLoop(T& trainer, Job const& job, Preparation const& ready, JsonLog& log, RunLog& run_log, JsonLog& trace)
      : trainer_(trainer),
        settings_(job.settings),
        ready_(ready),
        dtype_(job.dtype),
        first_rank_(trainer.engine().rank() == 0),
        tokens_(
            static_cast<double>(settings_.gradient_accumulation_steps * settings_.batch_size * settings_.block_size)),
        peak_(ready.peak),
        meter_(tokens_ * ready.config.flop_per_token(), peak_.flops),
        progress_(first_rank_, settings_.max_iters),
        log_(log),
        run_log_(run_log),
        trace_(trainer, settings_, trace, ready.resumed ? ready.resumed->iteration : 0),
        samples_(trainer, settings_, ready),
        failures_(settings_.log_interval),
        saver_(trainer.engine(), collective_timeout(settings_)) {
    run_.model = ready.config;
    if (ready.dataset && !ready.dataset->meta.path.empty()) run_.data_vocab_size = ready.dataset->meta.vocab_size;
    if (!first_rank_) return;
    trainer_.watch([this](bool training, std::int64_t done, std::int64_t of) {
      progress_.within(training ? "training" : "evaluating", done, of, training ? "micro-steps" : "batches");
    });
  }
  TrainingLoop(TrainingLoop const&) = delete;
  TrainingLoop& operator=(TrainingLoop const&) = delete;
  ~TrainingLoop() { trainer_.watch({}); }

  /// @return the exit code: saved_and_stopped if a rank was asked to
  int run() {
    try {
      return train();
    } catch (std::exception const& error) {
      run_log_.write(log_line_of_stop(trained_, error.what()));
      throw;
    }
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::size_t most_unwritten = 1000;
  static double seconds(Clock::time_point from, Clock::time_point to) {
    return std::chrono::duration<double>(to - from).count();
  }

  int train() {
    if (ready_.resumed) resume();
    run_.vocabulary = ready_.vocabulary;
    run_.data = ready_.data;
    run_.dtype = dtype_;
    auto const first = run_.iteration;
    progress_.begin(first);
    auto const began = Clock::now();
    for (std::int64_t iteration = first; iteration <= settings_.max_iters || settings_.eval_only; ++iteration) {
      current_iteration.store(iteration, std::memory_order_relaxed);
      stop_if_asked();
      run_.iteration = next_due_ = iteration;
      double const rate = learning_rate(settings_, iteration);
      bool better = false;
      if ((iteration % settings_.eval_interval == 0 && run_.evaluated != iteration) || settings_.eval_only) {
        trace_.pause();
        write_iterations();
        look_after_save();
        auto const evaluated = evaluate(iteration, rate);
        if (!evaluated) return stop();
        better = *evaluated;
        if (settings_.eval_only) return stop_after(iteration, "eval_only", EXIT_SUCCESS);
      }
      if (iteration > first && samples_.is_due(iteration)) sample(iteration);
      bool const due = iteration > first && (iteration % checkpoint_interval() == 0 || iteration == failures_.next());
      next_due_ = iteration + 1;
      if (due || (better && iteration > 0)) save_checkpoint(better);
      trace_.before_step(iteration);
      auto const start = Clock::now();
      auto const loss = trainer_.step(iteration, rate, wants_loss(iteration));
      if (loss && !std::isfinite(*loss))
        fsdp::fail<fsdp::Error>("rank {}: iteration {}: the training loss is {}", trainer_.engine().rank(), iteration,
                                loss_text(*loss));
      auto const end = Clock::now();
      trained_ = iteration + 1;
      span_ += seconds(start, end);
      ++spanned_;
      if (loss) {
        double const each = std::exchange(span_, 0.0) / static_cast<double>(std::exchange(spanned_, 0));
        last_loss_ = *loss;
        unwritten_.push_back({iteration, *loss, each, meter_.of(each), rate, seconds(began, end), tokens_ / each,
                              reserved(), trainer_.gradient_norm()});
        if (iteration % settings_.log_interval == 0) report(iteration - first);
        if (unwritten_.size() == most_unwritten) write_iterations();
      }
      if (iteration == first) write_memory(iteration);
      if (auto const table = trace_.after_step(iteration, iteration == settings_.max_iters); !table.empty())
        progress_.say(table);
      progress_.advance(iteration, last_loss_);
      if (iteration < settings_.max_iters && vote_.stops(trainer_.engine())) return stop();
    }
    if (trained_ == 0) {
      progress_.say(fmt::format("nothing to do: max_iters is {}", settings_.max_iters));
      return stop_after(first, "nothing to do", EXIT_SUCCESS);
    }
    expect_finite_weights();
    run_.iteration = trained_;
    bool const saved = save_last();
    if (exported_ < 0 || (settings_.always_save_checkpoint && exported_ != trained_))
      insist([&] { return export_weights(trained_); });
    return saved && lost_weights_.empty() ? stop_after(trained_, "max_iters", EXIT_SUCCESS) : stop_unsaved();
  }

  /// Where the device runs ahead of the host, losses are read when they are logged, and before evaluations and the end:
  /// what is logged, timed and saved there has all steps behind it.
  bool wants_loss(std::int64_t iteration) const {
    return iteration % settings_.log_interval == 0 || (iteration + 1) % settings_.eval_interval == 0 ||
           (iteration + 1) % checkpoint_interval() == 0 || iteration + 1 == failures_.next() ||
           samples_.is_due(iteration + 1) || iteration == settings_.max_iters;
  }
  std::int64_t checkpoint_interval() const {
    return settings_.checkpoint_interval > 0 ? settings_.checkpoint_interval : settings_.eval_interval;
  }
  void stop_if_asked() {
    if (!fsdp::host::termination_requested()) return;
    run_log_.write(log_line_of_stop(trained_, fsdp::host::termination_cause()));
    std::fflush(stdout);
    std::_Exit(fsdp::host::wait_terminated_exit_code);
  }

  /// @return whether it is the best so far; nullopt if the run was asked to stop meanwhile
  std::optional<bool> evaluate(std::int64_t iteration, double rate) {
    auto const began = Clock::now();
    auto const losses = trainer_.evaluate(iteration, [&] { return evaluation_vote_.stops(trainer_.engine()); });
    if (!losses) return std::nullopt;
    auto const [train_loss, val_loss] = *losses;
    look_for_peak(seconds(began, Clock::now()));
    run_.evaluated = iteration;
    run_.train_loss = train_loss;
    run_.val_loss = val_loss;
    EvaluationReport const report{iteration, train_loss, val_loss, rate, meter_.value()};
    progress_.say(line(report));
    log_.write(json(report));
    run_log_.write(log_line(report));
    if (trained_ > 0) write_memory(iteration);
    if (!std::isfinite(train_loss) || !std::isfinite(val_loss))
      fsdp::fail<fsdp::Error>(
          "rank {}: iteration {}: the evaluation gives a training loss of {} and a validation loss of {}",
          trainer_.engine().rank(), iteration, loss_text(train_loss), loss_text(val_loss));
    bool const better = val_loss < run_.best_val_loss;
    if (better) run_.best_val_loss = val_loss;
    bool const better_weights = val_loss < exported_val_loss_;
    bool const writes = (better_weights || settings_.always_save_checkpoint) && iteration > 0 && !settings_.eval_only;
    if ((!writes || export_weights(iteration)) && better_weights) exported_val_loss_ = val_loss;
    return better;
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

  /// Measures the peak of the host's ranks once more, where it takes 2 % of an evaluation or less, and keeps the
  /// higher.
  /// @param evaluation  seconds that it has taken
  /// @note Collective: yes; one exchange.
  void look_for_peak(double evaluation) {
    using World = std::remove_reference_t<decltype(trainer_.engine().world())>;
    if constexpr (measures_peak_again<World>) {
      auto& world = trainer_.engine().world();
      double const before = peak_.flops;
      using E = typename T::Element;
      if (!raise(peak_, world, evaluation >= 2.5 ? measure_host_rate<E>(world.device()) : 0)) return;
      meter_.set_peak(peak_.flops);
      progress_.say(
          fmt::format("{} peak measured again: {:.1f} GFLOP/s a rank instead of {:.1f} (mfu is relative to it)",
                      host_products<E>, peak_.flops / world.size() / 1e9, before / world.size() / 1e9));
    }
  }

  /// Logs the iteration that was read last.
  /// @param local  its number, counted from this process's first
  void report(std::int64_t local) {
    meter_.add(local, unwritten_.back().seconds);
    auto report = write_iterations();
    report.mfu = meter_.value();
    progress_.say(line(report));
    log_.write(json(report));
    look_after_save();
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
    if (std::isfinite(report.gradient_norm))
      say(norms_.add(report.iteration, report.gradient_norm), "gradient norm", "grad_norm");
    else
      progress_.say(fmt::format("warning: iteration {}: the gradient norm is {}; the optimizer skipped this step",
                                report.iteration, loss_text(report.gradient_norm)));
  }

  /// Writes every rank's memory to the run's log. @note Collective: yes; one exchange.
  void write_memory(std::int64_t iteration) {
    auto& engine = trainer_.engine();
    auto const ranks = engine.world().exchange(pack(rank_memory(engine.account())), "memory");
    if (first_rank_) run_log_.write(log_line_of_memory(iteration, ranks));
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
    run_.model = ready_.config;
    saved_val_loss_ = exported_val_loss_ = run_.best_val_loss;
    progress_.say(fmt::format("resuming from {} at iteration {}", run_.checkpoint.string(), run_.iteration));
  }

  /// Begins to save what a run goes on from: before iteration run_.iteration. In the background look_after_save() and
  /// finish_save() say how it ends.
  /// @return whether no file has failed so far
  /// @note Collective: yes.
  bool save_checkpoint(bool best) {
    finish_save("another attempt follows");
    if (best) run_.best_val_loss = run_.val_loss;  // finish_save() may have taken it back
    bool const background = settings_.async_checkpoint;
    bool const begun = attempt("checkpoint", run_.iteration, [&] {
      take_folder();
      fsdp::SaveOptions options;
      options.step = run_.iteration;
      options.keep_last = static_cast<int>(settings_.keep_last);
      if (best) options.pointers.emplace_back("best");
      auto const run = run_state_json(run_, settings_);
      if (background) return saver_.save(trainer_.optimizer(), settings_.out_dir, run, options);
      fsdp::save(trainer_.engine(), trainer_.optimizer(), settings_.out_dir, run, options);
    });
    saving_ = {run_.iteration, run_.best_val_loss};
    if (begun && background) return saves_in_background_ = true;
    return end_save(begun);
  }

  /// Asks whether the save under way has ended on all ranks, or failed on one. @note Collective: yes, during a save.
  void look_after_save() {
    if (!saves_in_background_) return;
    auto const mine = saver_.progress();
    auto const mean = trainer_.engine().mean_over_ranks({mine == fsdp::SaveProgress::failed ? 1.0 : 0.0,  //
                                                         mine == fsdp::SaveProgress::writing ? 1.0 : 0.0});
    if (mean[0] > 0 || mean[1] == 0) finish_save();
  }

  /// Waits for the save under way, if there is one. @param then  see attempt()
  /// @return whether it has not failed @note Collective: yes.
  bool finish_save(std::string_view then = {}) {
    if (!std::exchange(saves_in_background_, false)) return true;
    return end_save(attempt(
        "checkpoint", saving_.iteration, [&] { saver_.wait(); }, then));
  }
  bool end_save(bool whole) {
    if (whole) {
      run_log_.write(log_line_of_save(saving_.iteration, "checkpoint"));
      saved_val_loss_ = saving_.best_val_loss;
      failures_.clear();
    } else {
      run_.best_val_loss = saved_val_loss_;  // the next better one becomes the best
    }
    return whole;
  }

  /// Runs `act`. Where files cannot be written, it says so and training goes on.
  /// @param act   throws the same on every rank
  /// @param then  what follows a failure, for the message; empty: the next attempt that is due
  /// @return whether it did not fail
  template <class Act>
  bool attempt(std::string_view what, std::int64_t iteration, Act&& act, std::string_view then = {}) {
    try {
      std::forward<Act>(act)();
      return true;
    } catch (fsdp::ResourceError const& error) {
      last_failure_ = text_of_failed_save(what, iteration, error.what());
      auto const line = log_line_of_failed_save(iteration, what, error.what());
      run_log_.write(line);
      log_.write(line);
    }
    if (what == "checkpoint") failures_.add(run_.iteration);
    if (!then.empty()) progress_.say(fmt::format("warning: {}; {}", last_failure_, then));
    if (!then.empty() || ends_) return false;  // insist() says when it tries again
    auto const interval = checkpoint_interval();
    auto const usual = (next_due_ + interval - 1) / interval * interval;
    auto const next =
        what == "checkpoint"
            ? fmt::format("before iteration {}", std::min({failures_.next(), usual, settings_.max_iters + 1}))
            : fmt::format("after the next evaluation{}", settings_.always_save_checkpoint ? "" : " with a lower loss");
    progress_.say(fmt::format("warning: {}; training goes on, the next attempt is {}", last_failure_, next));
    return false;
  }

  /// Calls `act` until it returns true, a few times. @return whether it has @note Collective: yes, as `act` is.
  template <class Act>
  bool insist(Act&& act) {
    for (auto const pause : pauses_at_the_end) {
      if (act()) return true;
      progress_.say(fmt::format("warning: {}; the next attempt is in {} s", last_failure_, pause.count()));
      pause_before_attempt(pause, [&] { stop_if_asked(); });
    }
    return act();
  }
  /// Saves what no step follows. @return whether the checkpoint is whole @note Collective: yes.
  bool save_last() {
    ends_ = true;
    finish_save("another attempt follows");
    bool const saved = insist([&] { return save_checkpoint(false) && finish_save(); });
    if (!saved) lost_checkpoint_ = last_failure_;
    return saved;
  }

  /// Ends a run whose last files could not be written.
  int stop_unsaved() {
    if (first_rank_) {
      std::string newest;
      try {
        bool const own = folder_taken_ || ready_.resumed;
        newest = own ? fsdp::checkpoint::read_pointer(std::filesystem::path(settings_.out_dir) / "latest").value_or("")
                     : std::string();
      } catch (fsdp::ConfigError const&) {  // then none is known
      }
      if (!lost_weights_.empty()) report_error(lost_weights_);
      if (!lost_checkpoint_.empty()) report_error(lost_checkpoint_);
      std::filesystem::path const folder(settings_.out_dir);
      report_error(newest.empty() ? fmt::format("there is no whole checkpoint in {}", settings_.out_dir)
                                  : fmt::format("the newest whole checkpoint is {}", (folder / newest).string()));
    }
    return stop_after(trained_, "files could not be written", EXIT_FAILURE);
  }

  /// Before what no step follows, whose loss would tell.
  /// @throws fsdp::Error on every rank if a weight is not finite
  /// @note Collective: yes; gathers the weights, as an export does.
  void expect_finite_weights() {
    auto& engine = trainer_.engine();
    std::string found;  // the first such tensor; on rank 0 alone
    fsdp::export_full(engine, [&](fsdp::TensorInfo const& tensor, std::span<float const> values) {
      auto const finite = [](float value) { return std::isfinite(value); };
      if (found.empty() && !std::all_of(values.begin(), values.end(), finite)) found = tensor.name;
    });
    auto const name = engine.world().exchange(found, "weights that are not finite").front();
    if (!name.empty())
      fsdp::fail<fsdp::Error>(
          "rank {}: iteration {}: weights of '{}' are not finite after the step; they were not saved", engine.rank(),
          trained_ - 1, name);
  }

  /// After an iteration: whoever starts the run again goes on from here.
  int stop() {
    if (trained_ == 0) {
      progress_.say("asked to stop: nothing was trained since the start, and nothing is saved");
      return stop_after(run_.iteration, "asked to stop", saved_and_stopped);
    }
    expect_finite_weights();
    run_.iteration = trained_;
    if (!save_last()) return stop_unsaved();
    auto const text = fmt::format("asked to stop: saved in {} before iteration {}; continue with --init_from=resume",
                                  settings_.out_dir, trained_);
    progress_.say(text);
    if (launcher_ends_run && first_rank_) fmt::print(stderr, "nanogpt: {}\n", text);
    return stop_after(trained_, "asked to stop", saved_and_stopped);
  }

  /// Before anything is saved: removes the run that this one overwrites, and says what the tokens are. Until then the
  /// folder is as the other run has left it.
  /// @throws fsdp::Error on every rank if files cannot be written
  /// @note Collective: yes, until it has succeeded once.
  void take_folder() {
    if (folder_taken_) return;
    fsdp::checkpoint::agreed(trainer_.engine().world(), "out_dir", [&] {
      if (!first_rank_) return "";
      if (settings_.overwrite) remove_run(settings_.out_dir);
      auto const& meta = ready_.dataset->meta;
      save_vocabulary(settings_.out_dir, meta);
      // Token files without a vocabulary are GPT-2's: the model keeps the tokenizer that it came with.
      if (meta.path.empty() && ready_.pretrained && !ready_.pretrained->tokenizer.none())
        copy_tokenizer(ready_.pretrained->tokenizer, settings_.out_dir);
      return "";
    });
    folder_taken_ = true;
  }

  /// The whole weights, for `sample` and for others' programs. @return whether the files are there
  /// @note Collective: yes.
  bool export_weights(std::int64_t iteration) {
    bool const written = attempt("weights", iteration, [&] {
      take_folder();
      progress_.say(fmt::format("saving checkpoint to {}", settings_.out_dir));
      std::filesystem::path const folder(settings_.out_dir);
      save_weights(trainer_.engine(), folder / weights_name);
      fsdp::checkpoint::agreed(trainer_.engine().world(), "config.json", [&] {
        ModelState const state{iteration, run_.train_loss, run_.val_loss, run_.best_val_loss};
        if (first_rank_) save_model_config(folder, ready_.config, state, &settings_, ready_.dataset->meta);
        return "";
      });
    });
    lost_weights_ = written ? std::string() : last_failure_;
    if (!written) return false;
    exported_ = iteration;
    run_log_.write(log_line_of_save(iteration, "weights"));
    return true;
  }

  T& trainer_;
  Settings const& settings_;
  Preparation const& ready_;
  std::string dtype_;  ///< that is computed in
  bool first_rank_;
  double tokens_;
  Peak peak_;
  MfuMeter meter_;
  Progress progress_;
  JsonLog& log_;
  RunLog& run_log_;
  TraceWindow<T> trace_;
  RunState run_;
  TrainingSamples<T> samples_;
  static constexpr double vote_every = T::runs_ahead ? 1.0 : 0.1;
  StopVote vote_{vote_every}, evaluation_vote_{vote_every};
  FailedSaves failures_;
  struct {
    std::int64_t iteration;
    double best_val_loss;
  } saving_{};                        ///< the last checkpoint that was begun
  std::int64_t next_due_ = 0;         ///< the next iteration before which a checkpoint may be due
  bool saves_in_background_ = false;  ///< that checkpoint is not known to be whole
  bool ends_ = false;                 ///< no step follows
  std::string last_failure_, lost_checkpoint_, lost_weights_;  ///< texts; empty: none
  double saved_val_loss_ = RunState{}.best_val_loss;           ///< the lowest that whole checkpoints know
  double exported_val_loss_ = RunState{}.best_val_loss;        ///< the lowest when weights were written
  fsdp::BackgroundSaver<typename T::Engine> saver_;
  double span_ = 0;                         ///< seconds that iterations have taken since a loss was read
  std::int64_t spanned_ = 0;                ///< how many
  std::vector<IterationReport> unwritten_;  ///< read since the run's log was last written; losses are this rank's
  JumpWatch losses_{1.2}, norms_{5};        ///< rank 0's
  double last_loss_ = 0;
  bool folder_taken_ = false;
  std::int64_t exported_ = -1;  ///< iteration of the last export
  std::int64_t trained_ = 0;    ///< optimizer steps of the run, once this process has done one
};

}  // namespace nanogpt
