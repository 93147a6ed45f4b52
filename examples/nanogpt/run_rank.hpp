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
#include <type_traits>

#include "agreement.hpp"
#include "bench.hpp"
#include "commands.hpp"
#include "fsdp/host/backoff.hpp"
#include "fsdp/host/device.hpp"
#include "metrics.hpp"
#include "progress.hpp"
#include "saved_model.hpp"
#include "trace_window.hpp"
#include "train.hpp"
#include "trainer.hpp"

namespace nanogpt {

namespace detail {

/// Highest fp32 matrix-product rate of the device, FLOP per second, measured for about 50 ms with the model's own products.
template <class D>
double measure_peak(D const& device) {
  if constexpr (std::is_same_v<D, fsdp::host::Device>) {
    return measure_sgemm_peak();
  } else {
    using Clock = std::chrono::steady_clock;
    constexpr std::int64_t n = 4096;
    constexpr std::size_t elements = n * n;
    fsdp::MemoryAccount account;
    fsdp::AccountedMemory<D const> const memory(device, account, fsdp::MemoryTag::workspace, 3 * elements * sizeof(float));
    auto stream = device.make_stream("peak", fsdp::StreamPriority::normal);
    device.zero_async(stream, memory.data(), memory.bytes());
    Gemm<D> gemm(device);
    auto* const a = memory.template as<float>();
    auto const product = [&] {
      auto const start = Clock::now();
      gemm.run(stream, Op::none, Op::none, n, n, n, 1.0f, static_cast<float const*>(a), n, static_cast<float const*>(a + elements), n,
               0.0f, a + 2 * elements, n);
      device.synchronize(stream);
      return std::chrono::duration<double>(Clock::now() - start).count();
    };
    double best = product();  // also warms up
    auto const begin = Clock::now();
    while (Clock::now() - begin < std::chrono::milliseconds(50)) best = std::min(best, product());
    return 2.0 * static_cast<double>(n * n * n) / best;
  }
}

/// What the ranks have agreed on before anything is trained.
struct Preparation {
  std::optional<Dataset> dataset;
  GptConfig config;
  double sgemm_peak = 0;  ///< measured, of all ranks together, FLOP per second
};

/// Opens and checks what the run needs. @throws AgreedError on every rank if one of them finds a fault
template <class C>
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
  auto const peaks = world.exchange(fmt::format("{:.17g}", measure_peak(world.device())));
  for (auto const& text : peaks) ready.sgemm_peak += std::strtod(text.c_str(), nullptr);
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
  fmt::print("{}, strategy {}, device {}, dtype float32\n", job.world_kind, T::Engine::ShardingStrategy::name, job.device);
  if (job.device == "cpu") {
    auto const blas = blas_info();
    fmt::print("OpenBLAS core {}, {} thread{} a rank; sgemm peak measured: {:.1f} GFLOP/s a rank (mfu is relative to it)\n", blas.core,
               blas.threads, blas.threads == 1 ? "" : "s", ready.sgemm_peak / ranks / 1e9);
    if (blas.wider_idle)
      fmt::print("warning: this processor has AVX-512, but OpenBLAS runs its '{}' kernels: {}\n", blas.core,
                 std::getenv("OPENBLAS_CORETYPE") != nullptr ? "unset OPENBLAS_CORETYPE, or set it to SkylakeX"
                                                            : "set OPENBLAS_CORETYPE=SkylakeX");
  }
  if (job.device != "cpu")
    fmt::print("fp32 matrix products measured: {:.1f} GFLOP/s a rank (mfu is relative to it)\n", ready.sgemm_peak / ranks / 1e9);
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
        tokens_(static_cast<double>(settings_.gradient_accumulation_steps * settings_.batch_size * settings_.block_size)),
        meter_(tokens_ * ready.config.flop_per_token(), ready.sgemm_peak),
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
      double const loss = trainer_.step(iteration, rate);
      if (!std::isfinite(loss))
        fsdp::fail<fsdp::Error>("rank {}: iteration {}: the training loss is {}", trainer_.engine().rank(), iteration, loss);
      auto const end = Clock::now();
      trained_ = iteration + 1;
      if (iteration % settings_.log_interval == 0) report(iteration, loss, rate, seconds(start, end), seconds(began, end));
      if (auto const table = trace_.after_step(iteration, iteration == settings_.max_iters); !table.empty()) progress_.say(table);
      progress_.advance(iteration, loss);
    }
    if (saved_ < 0 || (settings_.always_save_checkpoint && saved_ != trained_)) save(trained_);
  }

 private:
  using Clock = std::chrono::steady_clock;
  static double seconds(Clock::time_point from, Clock::time_point to) { return std::chrono::duration<double>(to - from).count(); }

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
  double best_ = 1e9;
  std::int64_t saved_ = -1;    ///< iteration of the last checkpoint
  std::int64_t trained_ = 0;   ///< optimizer steps done
};

}  // namespace detail

template <fsdp::Strategy S, fsdp::Communicator C>
int run_rank(C world, Job const& job) {
  detail::Preparation ready;
  std::optional<JsonLog> log, trace;
  bool const first = world.rank() == 0;
  try {
    ready = detail::prepare(world, job);
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
  fsdp::Mesh<C> mesh(std::move(world), {static_cast<int>(job.settings.shard_group)});
  Trainer<S, C> trainer(mesh, job.settings, ready.config, source);
  if (first) detail::introduce(trainer, job, ready, ranks);
  if (job.command == Command::bench) {
    bench(trainer, job, ready.sgemm_peak, ranks, *log);
  } else {
    detail::TrainingLoop(trainer, job, ready, *log, *trace).run();
  }
  return 0;
}

}  // namespace nanogpt
