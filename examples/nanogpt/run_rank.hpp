// SPDX-License-Identifier: Apache-2.0
// The definition of run_rank: preparation that all ranks agree on, then nanoGPT's training loop, or the benchmark.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <utility>

#include "agreement.hpp"
#include "bench.hpp"
#include "commands.hpp"
#include "fsdp/host/backoff.hpp"
#include "metrics.hpp"
#include "peak.hpp"
#include "progress.hpp"
#include "saved_model.hpp"
#include "trace_window.hpp"
#include "job.hpp"
#include "trainer.hpp"

namespace nanogpt {

namespace detail {

/// What the ranks have agreed on before anything is trained.
struct Preparation {
  std::optional<Dataset> dataset;
  GptConfig config;
  Peak peak;  ///< of all ranks together; the source is known to the ranks that looked it up, rank 0 among them
};

/// Opens and checks what the run needs. @throws AgreedError on every rank if one of them finds a fault
/// @tparam T  what the run computes in
template <class T, class C>
Preparation prepare(C& world, Job const& job) {
  Preparation ready;
  auto const& settings = job.settings;
  bool const training = job.command == Command::train;
  agree(world, [&] {
    check_together(settings, job.command, world.size());
    std::error_code ignored;
    if (training || std::filesystem::is_directory(std::filesystem::path("data") / settings.dataset, ignored))
      ready.dataset.emplace(open_dataset(settings.dataset));
    ready.config = model_config(settings, ready.dataset ? ready.dataset->meta.vocab_size : Meta{}.vocab_size);
    if (!ready.dataset) return;
    for (auto const split : {Split::train, Split::val}) {
      auto const& tokens = ready.dataset->split(split);
      if (tokens.size() <= settings.block_size)
        fsdp::fail<fsdp::ConfigError>("setting 'block_size': {} is too long for '{}' with {} tokens: expected at most {}",
                                      settings.block_size, tokens.path().string(), tokens.size(), tokens.size() - 1);
      // Each rank checks its part of the ids.
      auto const bound = [&](int rank) { return tokens.size() / world.size() * rank + tokens.size() % world.size() * rank / world.size(); };
      tokens.check_ids(ready.config.vocab_size, bound(world.rank()), bound(world.rank() + 1));
    }
    if (training && world.rank() == 0) prepare_out_dir(settings.out_dir);
  });
  agree(world, [&] { expect_same_settings(world, settings); });
  ready.peak = measure_peak<T>(world);
  return ready;
}

inline BatchSource batch_source(Settings const& settings, Preparation const& ready, int rank, int ranks) {
  BatchSource source;
  source.dataset = ready.dataset ? &*ready.dataset : nullptr;
  source.vocab_size = ready.config.vocab_size;
  source.seed = static_cast<std::uint64_t>(settings.seed);
  source.rank = rank;
  source.ranks = ranks;
  source.batch_size = settings.batch_size;
  source.micro_steps = settings.gradient_accumulation_steps / ranks;
  source.block_size = settings.block_size;
  return source;
}

/// Prints what the run is, on rank 0.
template <class T>
void introduce(T& trainer, Job const& job, Preparation const& ready, int ranks) {
  auto const& s = job.settings;
  fmt::print("tokens per iteration will be: {}\n", with_commas(s.gradient_accumulation_steps * s.batch_size * s.block_size));
  fmt::print("{}, strategy {}, device {}, dtype {}\n", job.world_kind, trainer.engine().strategy().name, job.device,
             job.dtype);
  if (job.device == "cpu") {
    auto const blas = blas_info();
    fmt::print(
        "OpenBLAS core {}, {} thread{} a rank; sgemm peak measured: {:.1f} GFLOP/s a rank (mfu is relative to it)\n",
        blas.core, blas.threads, blas.threads == 1 ? "" : "s", ready.peak.flops / ranks / 1e9);
    if (blas.wider_idle)
      fmt::print("warning: this processor has AVX-512, but OpenBLAS runs its '{}' kernels: {}\n", blas.core,
                 std::getenv("OPENBLAS_CORETYPE") != nullptr ? "unset OPENBLAS_CORETYPE, or set it to SkylakeX"
                                                            : "set OPENBLAS_CORETYPE=SkylakeX");
  }
  if (job.device != "cpu")
    fmt::print("mfu is relative to the {}: {:.1f} TFLOP/s for all ranks\n", ready.peak.source, ready.peak.flops / 1e12);
  if (!ready.dataset) fmt::print("there is no data/{}: the batches are random tokens\n", s.dataset);
  if (ready.dataset && ready.dataset->meta.path.empty())
    fmt::print("no meta.json: vocabulary of {} (GPT-2's 50257, padded)\n", ready.config.vocab_size);
  if (ready.dataset && !ready.dataset->meta.path.empty())
    fmt::print("found vocab_size = {} (inside {})\n", ready.config.vocab_size, ready.dataset->meta.path.string());
  ParameterCount decayed, others;
  for (auto const& tensor : fsdp::tensor_list(trainer.engine())) {
    auto& group = tensor.decay ? decayed : others;
    ++group.tensors;
    group.elements += tensor.numel;
  }
  fmt::print("number of parameters: {:.2f}M\n", static_cast<double>(ready.config.parameters_without_positions()) / 1e6);
  fmt::print("num decayed parameter tensors: {}, with {} parameters\n", decayed.tensors, with_commas(decayed.elements));
  fmt::print("num non-decayed parameter tensors: {}, with {} parameters\n", others.tensors, with_commas(others.elements));
  std::fflush(stdout);
}

/// nanoGPT's loop.
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
      if (auto const table = trace_.after_step(iteration, iteration == settings_.max_iters); !table.empty()) progress_.say(table);
      progress_.advance(iteration, last_loss_);
    }
    if (saved_ < 0 || (settings_.always_save_checkpoint && saved_ != trained_)) save(trained_);
  }

 private:
  using Clock = std::chrono::steady_clock;
  static double seconds(Clock::time_point from, Clock::time_point to) { return std::chrono::duration<double>(to - from).count(); }

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
    IterationReport const report{iteration, mean,  time, meter_.value(),
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
  std::int64_t saved_ = -1;    ///< iteration of the last checkpoint
  std::int64_t trained_ = 0;   ///< optimizer steps done
};

}  // namespace detail

template <class P, fsdp::Communicator C>
int run_rank(C world, Job const& job) {
  detail::Preparation ready;
  std::optional<JsonLog> log, trace;
  bool const first = world.rank() == 0;
  try {
    ready = detail::prepare<typename P::Param>(world, job);
    agree(world, [&] {
      bool const training = job.command == Command::train;
      log.emplace(training ? "log_json" : "json", !first ? std::string() : training ? job.settings.log_json : job.settings.json);
      trace.emplace("trace", first && training ? job.settings.trace : std::string());
    });
  } catch (AgreedError const& error) {
    if (first) report_error(error.what());
    return usage_error;
  }
  int const ranks = world.size();
  auto const source = detail::batch_source(job.settings, ready, world.rank(), ranks);
  fsdp::Mesh<C> mesh(std::move(world));
  Trainer<C, P> trainer(mesh, job.settings, ready.config, source);
  if (first) detail::introduce(trainer, job, ready, ranks);
  if (job.command == Command::bench) {
    bench(trainer, job, ready.peak, ranks, *log);
  } else {
    detail::TrainingLoop(trainer, job, ready, *log, *trace).run();
  }
  return 0;
}

}  // namespace nanogpt
