// SPDX-License-Identifier: Apache-2.0
// The checkpoints and weights that a run writes. A file that cannot be written does not end training.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "fsdp/checkpoint.hpp"
#include "fsdp/engine.hpp"
#include "fsdp/error.hpp"
#include "fsdp/snapshots.hpp"
#include "transformer/launch/process.hpp"
#include "transformer/report/log_lines.hpp"
#include "transformer/report/metrics.hpp"
#include "transformer/report/progress.hpp"
#include "transformer/run/choices.hpp"
#include "transformer/run/table.hpp"
#include "transformer/training/folder.hpp"
#include "transformer/training/preparation.hpp"
#include "transformer/training/snapshots.hpp"
#include "transformer/training/state.hpp"
#include "transformer/training/vocabulary.hpp"

namespace transformer {

/// Attempts after a save that has failed: after one log line, then after 2, 4, 8 ... of them. Each attempt may fill the
/// disk first, so they become rare.
class FailedSaves {
 public:
  /// @param log_interval  iterations between log lines
  explicit FailedSaves(std::int64_t log_interval) : log_interval_(log_interval) {}

  /// A save has failed. @param iteration  before which the run stands
  void add(std::int64_t iteration) {
    wait_ = wait_ == 0 ? log_interval_ : std::min<std::int64_t>(2 * wait_, std::int64_t{1} << 40);
    next_ = iteration + wait_;
  }
  /// A save has succeeded.
  void clear() { wait_ = 0, next_ = -1; }
  /// Before which iteration the next attempt is; -1: none is.
  std::int64_t next() const { return next_; }

 private:
  std::int64_t log_interval_;
  std::int64_t wait_ = 0, next_ = -1;
};

/// The files of one run: checkpoints, weights, and how attempts at them have ended. All ranks call it alike.
/// @tparam T  Trainer
template <class T>
class RunFiles {
 public:
  /// @param run  the loop's. A failed save takes run.best_val_loss back: the next better one becomes the best
  RunFiles(T& trainer, Settings const& settings, Preparation<typename T::Program> const& ready, RunState& run,
           Progress& progress, JsonLog& log, LogFile& run_log)
      : trainer_(trainer),
        settings_(settings),
        ready_(ready),
        run_(run),
        progress_(progress),
        log_(log),
        run_log_(run_log),
        first_rank_(trainer.engine().rank() == 0),
        replaces_(first_rank_ && settings.overwrite),
        failures_(settings.log_interval),
        saver_(trainer.engine(), collective_timeout(settings)) {
    if (!takes_snapshots()) return;
    snapshots_.emplace(trainer.engine(), snapshot_place(settings.snapshot_folder, settings.out_dir));
    if (!ready.keeps_snapshots) snapshots_->clear();  // of a run that this one replaces
    if (snapshots_->nodes() == 1 && trainer.engine().world_size() > 1)
      progress_.say("note: all ranks share one node: if it is lost, so are the snapshots");
  }

  /// The run goes on from a checkpoint, whose state `run` is.
  void resume() {
    saved_val_loss_ = exported_val_loss_ = run_.best_val_loss;
    auto const& from = ready_.resumed->checkpoint;
    has_checkpoint_ = std::filesystem::path(settings_.out_dir) / from.filename() == from;
  }

  bool is_checkpoint_due(std::int64_t iteration) const {
    return iteration % interval() == 0 || iteration == failures_.next();
  }

  /// Begins to save the state before iteration run.iteration. If it is written in the background, look_after_save() and
  /// the next save report how it ends.
  /// @param best  the state has the lowest validation loss
  /// @return whether no file has failed so far
  /// @note Collective: yes.
  bool save_checkpoint(bool best) {
    finish_save("another attempt follows");
    if (best) run_.best_val_loss = run_.val_loss;  // finish_save() may have taken it back
    bool const background = settings_.async_checkpoint;
    saving_ = {run_.iteration, run_.best_val_loss};
    bool const begun = attempt("checkpoint", run_.iteration, [&] {
      take_folder();
      fsdp::SaveOptions options;
      options.step = run_.iteration;
      options.keep_last = static_cast<int>(settings_.keep_last);
      options.without_frozen = !ready_.base.empty();
      if (best) options.pointers.emplace_back("best");
      auto const run = run_state_json(run_, settings_);
      if (background) return saver_.save(trainer_.optimizer(), settings_.out_dir, run, options);
      fsdp::save(trainer_.engine(), trainer_.optimizer(), settings_.out_dir, run, options);
    });
    if (begun && background) return saves_in_background_ = true;
    return end_save(begun);
  }

  bool takes_snapshots() const { return settings_.snapshot_interval > 0 && !settings_.eval_only; }
  /// A run that replaces another one takes no snapshot before its first checkpoint: [Note: Replacing a run].
  bool is_snapshot_due(std::int64_t iteration) const {
    return takes_snapshots() && iteration % settings_.snapshot_interval == 0 &&
           (!settings_.overwrite || has_checkpoint_);
  }
  /// Takes a snapshot of the state before iteration run.iteration. If it cannot be written, training goes on. Of
  /// several in turn that are left out, the first is reported.
  /// @note Collective: yes.
  void take_snapshot() {
    auto run = run_;
    run.best_val_loss = std::max(run.best_val_loss, saved_val_loss_);  // as whole checkpoints know it
    auto const taken =
        snapshots_->take(trainer_.optimizer(), run_.iteration, run_state_json(run, settings_), !ready_.base.empty());
    bool const had_begun = std::exchange(last_snapshot_begun_, taken.begun);
    if (!taken.warning.empty() && (taken.begun || had_begun)) progress_.say(fmt::format("warning: {}", taken.warning));
  }

  /// Asks whether the save under way has ended on all ranks, or failed on one. @note Collective: yes, during a save.
  void look_after_save() {
    if (!saves_in_background_) return;
    auto const mine = saver_.progress();
    auto const mean = trainer_.engine().mean_over_ranks({mine == fsdp::SaveProgress::failed ? 1.0 : 0.0,  //
                                                         mine == fsdp::SaveProgress::writing ? 1.0 : 0.0});
    if (mean[0] > 0 || mean[1] == 0) finish_save();
  }

  /// After an evaluation, before iteration run.iteration: saves the weights if their loss is the lowest of those that
  /// were written, or if the settings say so. Until a checkpoint is whole, none are written: a run that is killed
  /// leaves no weights without a checkpoint that `auto` goes on from, and they take no room that the checkpoint needs.
  /// @note Collective: yes.
  void save_evaluated_weights() {
    bool const better = run_.val_loss < exported_val_loss_;
    bool const writes = (better || settings_.always_save_checkpoint) && run_.iteration > 0 && !settings_.eval_only;
    if (writes && !has_checkpoint_) finish_save();
    if ((!writes || (has_checkpoint_ && save_weights_now())) && better) exported_val_loss_ = run_.val_loss;
  }

  /// Saves a state that no step follows: several attempts.
  /// @param look  called while it waits between them: a second signal ends the process
  /// @return whether the checkpoint is whole
  /// @note Collective: yes.
  template <class Look>
  bool save_last_checkpoint(Look&& look) {
    ends_ = true;
    finish_save("another attempt follows");
    bool const saved = insist([&] { return save_checkpoint(false) && finish_save(); }, look);
    if (!saved) lost_checkpoint_ = last_failure_;
    if (saved && snapshots_) snapshots_->clear();                     // nothing is newer than the checkpoint
    if (!saved && snapshots_) static_cast<void>(snapshots_->wait());  // whether the last one is whole: report_lost()
    return saved;
  }
  /// Saves the weights of the run's end, if there are none yet or if the settings say so.
  /// @return whether the weights are there that should be. See save_last_checkpoint().
  template <class Look>
  bool save_last_weights(Look&& look) {
    ends_ = true;
    if (exported_ < 0 || (settings_.always_save_checkpoint && exported_ != run_.iteration))
      insist([&] { return save_weights_now(); }, look);
    return lost_weights_.empty();
  }

  /// Reports what could not be saved at the end, and what there is instead.
  void report_lost() const {
    std::string newest;
    std::filesystem::path const folder(settings_.out_dir);
    try {
      bool const own = folder_taken_ || ready_.resumed;
      if (own) newest = fsdp::checkpoint::read_pointer(folder / "latest").value_or("");
    } catch (fsdp::ConfigError const&) {  // then none is known
    }
    if (!lost_weights_.empty()) report_error(lost_weights_);
    if (!lost_checkpoint_.empty()) report_error(lost_checkpoint_);
    report_error(newest.empty() ? fmt::format("there is no whole checkpoint in {}", settings_.out_dir)
                                : fmt::format("the newest whole checkpoint is {}", (folder / newest).string()));
    if (newest.empty() && snapshots_ && snapshots_->newest_whole() >= 0)
      report_error(fmt::format("the snapshot of step {} is whole in '{}'; --init_from=auto continues from it",
                               snapshots_->newest_whole(), settings_.snapshot_folder));
    if (auto const old = replaced_run_in(folder); replaces_ && !old.empty())
      report_error(fmt::format("{} has the run that this one was to replace", old.string()));
    if (newest.empty() && exported_ >= 0)
      report_error(fmt::format(
          "{} has the weights before iteration {}; to continue from them without the optimizer's state, give --{}={} "
          "and "
          "another out_dir",
          (folder / T::Program::saved_name(settings_)).string(), exported_, setting_of_weights(), settings_.out_dir));
  }

 private:
  std::int64_t interval() const {
    return settings_.checkpoint_interval > 0 ? settings_.checkpoint_interval : settings_.eval_interval;
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
      has_checkpoint_ = true;
      run_log_.write(log_line_of_save(saving_.iteration, "checkpoint"));
      saved_val_loss_ = saving_.best_val_loss;
      if (failures_.next() >= 0)
        progress_.say(fmt::format("the checkpoint before iteration {} was saved", saving_.iteration));
      failures_.clear();
      replace_run();
    } else {
      run_.best_val_loss = saved_val_loss_;
    }
    return whole;
  }

  /// A checkpoint of this run is whole: removes the one that it overwrites.
  void replace_run() {
    if (!std::exchange(replaces_, false)) return;
    try {
      remove_replaced_run(settings_.out_dir);
    } catch (fsdp::ResourceError const& error) {
      progress_.say(fmt::format("warning: the run that this one has replaced could not be removed: {}", error.what()));
    }
  }

  /// Whole weights, for `sample` and for other programs. @return whether the files are there @note Collective: yes.
  bool save_weights_now() {
    auto const iteration = run_.iteration;
    bool const written = attempt("weights", iteration, [&] {
      take_folder();
      std::filesystem::path const folder(settings_.out_dir);
      progress_.say(fmt::format("saving weights to {}", (folder / T::Program::saved_name(settings_)).string()));
      T::Program::save_model(trainer_.engine(), folder, settings_, ready_, run_);
    });
    lost_weights_ = written ? std::string() : last_failure_;
    if (!written) return false;
    exported_ = iteration;
    run_log_.write(log_line_of_save(iteration, "weights"));
    return true;
  }

  /// Runs `act`. If files cannot be written, says so, and training goes on.
  /// @param act   throws the same on every rank
  /// @param then  what follows a failure, for the message; empty: the next attempt that is due
  /// @return whether it did not fail
  template <class Act>
  bool attempt(std::string_view what, std::int64_t iteration, Act&& act, std::string_view then = {}) {
    try {
      std::forward<Act>(act)();
      return true;
    } catch (fsdp::ResourceError const& error) {
      last_failure_ = fmt::format("the {} before iteration {} could not be saved: {}", what, iteration, error.what());
      auto const line = log_line_of_failed_save(iteration, what, error.what());
      run_log_.write(line);
      log_.write(line);
    }
    bool const is_checkpoint = what == "checkpoint";
    if (is_checkpoint) failures_.add(run_.iteration);
    if (!then.empty()) progress_.say(fmt::format("warning: {}; {}", last_failure_, then));
    if (!then.empty() || ends_) return false;  // insist() says when it tries again
    auto const due_anyway = (saving_.iteration / interval() + 1) * interval();
    auto const next =
        is_checkpoint
            ? fmt::format("before iteration {}", std::min({failures_.next(), due_anyway, settings_.max_iters + 1}))
            : fmt::format("after the next evaluation{}", settings_.always_save_checkpoint ? "" : " with a lower loss");
    progress_.say(fmt::format("warning: {}; training goes on, the next attempt is {}", last_failure_, next));
    return false;
  }

  /// Calls `act` until it returns true, a few times. @return whether it has @note Collective: yes, as `act` is.
  template <class Act, class Look>
  bool insist(Act const& act, Look const& look) {
    for (int const seconds : {1, 2, 4}) {
      if (act()) return true;
      progress_.say(fmt::format("warning: {}; the next attempt is in {} s", last_failure_, seconds));
      constexpr std::chrono::milliseconds slice(50);
      for (std::chrono::milliseconds left = std::chrono::seconds(seconds); left.count() > 0; left -= slice) {
        look();
        std::this_thread::sleep_for(slice);
      }
    }
    return act();
  }

  /// Before anything is saved: sets the run aside that this one overwrites, and writes the vocabulary. Until then the
  /// folder is as the other run has left it. See [Note: Replacing a run].
  /// @throws fsdp::Error on every rank if files cannot be written
  /// @note Collective: yes, until it has succeeded once.
  void take_folder() {
    if (folder_taken_) return;
    fsdp::checkpoint::agreed(trainer_.engine().world(), "out_dir", [&] {
      if (!first_rank_) return "";
      if (settings_.overwrite) set_run_aside(settings_.out_dir);
      save_vocabulary(settings_.out_dir, ready_.dataset->meta);
      T::Program::save_tokenizer(settings_.out_dir, ready_);
      return "";
    });
    folder_taken_ = true;
  }

  T& trainer_;
  Settings const& settings_;
  Preparation<typename T::Program> const& ready_;
  RunState& run_;
  Progress& progress_;
  JsonLog& log_;
  LogFile& run_log_;
  bool first_rank_;
  bool replaces_;  ///< a run is to be removed when the first checkpoint is whole; rank 0 alone
  bool folder_taken_ = false;
  bool last_snapshot_begun_ = true;
  bool has_checkpoint_ = false;       ///< of this run, in out_dir, and whole
  bool saves_in_background_ = false;  ///< the last checkpoint is not known to be whole
  bool ends_ = false;                 ///< no step follows
  std::int64_t exported_ = -1;        ///< iteration of the last weights
  struct {
    std::int64_t iteration;
    double best_val_loss;
  } saving_{};                                                 ///< the last checkpoint that was begun
  double saved_val_loss_ = RunState{}.best_val_loss;           ///< the lowest that whole checkpoints know
  double exported_val_loss_ = RunState{}.best_val_loss;        ///< the lowest when weights were written
  std::string last_failure_, lost_checkpoint_, lost_weights_;  ///< texts; empty: none
  FailedSaves failures_;
  fsdp::BackgroundSaver<typename T::Engine> saver_;
  std::optional<fsdp::Snapshots<typename T::Engine>> snapshots_;
};

}  // namespace transformer
