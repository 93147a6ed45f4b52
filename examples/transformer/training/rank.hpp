// SPDX-License-Identifier: Apache-2.0
// One rank of a program: preparation, then the training loop or the benchmark; or samples.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "fsdp/fsdp.hpp"
#include "transformer/launch/job.hpp"
#include "transformer/launch/program.hpp"
#include "transformer/launch/refusals.hpp"
#include "transformer/math/blas.hpp"
#include "transformer/math/peak.hpp"
#include "transformer/report/log_lines.hpp"
#include "transformer/report/metrics.hpp"
#include "transformer/run/bench.hpp"
#include "transformer/run/pieces.hpp"
#include "transformer/sampling/sampler.hpp"
#include "transformer/training/bench_variants.hpp"
#include "transformer/training/header.hpp"
#include "transformer/training/load.hpp"
#include "transformer/training/loop.hpp"
#include "transformer/training/preparation.hpp"
#include "transformer/training/samples.hpp"
#include "transformer/training/trainer.hpp"

namespace transformer {

/// Prints what the run is, on rank 0.
template <class T>
void introduce(T& trainer, Job const& job, Preparation<typename T::Program> const& ready, int ranks) {
  auto const& s = job.settings;
  for (auto const& name : s.given) fmt::print("overriding: {} = {}\n", name, find_setting(name)->text_of(s));
  for (auto const& line : ready.lines) fmt::print("{}\n", line);
  for (auto const& note : notes_on(s, ranks, job.shares_gpus)) fmt::print("{}\n", note);
  fmt::print("tokens per iteration will be: {}\n",
             with_commas(s.gradient_accumulation_steps * s.batch_size * s.block_size));
  fmt::print("{}, strategy {}, device {}, dtype {}", job.world_kind, trainer.engine().strategy().name, job.device,
             job.dtype);
  if (ranks > 1) fmt::print(", gradients summed in {}", summed_in(s));
  fmt::print("\n");
  if (!job.dtype_note.empty()) fmt::print("note: {}\n", job.dtype_note);
  if (int const cores = static_cast<int>(std::thread::hardware_concurrency()); cores > 0 && job.threads > cores)
    fmt::print("note: each rank uses {} threads, but the machine has only {} cores\n", job.threads, cores);
  if (job.device == "cpu") {
    auto const blas = blas_info();
    bool const wide = job.dtype == "float32";
    auto const own =
        blas.own_products ? fmt::format(", most products by AVX-512 kernels of {}'s own", program_name) : std::string();
    fmt::print("{}, {} thread{} a rank; {} peak measured: {:.1f} GFLOP/s a rank (mfu is relative to it)\n",
               wide ? fmt::format("OpenBLAS core {}{}", blas.core, own) : "products by oneDNN", job.threads,
               job.threads == 1 ? "" : "s", host_products<typename T::Element>, ready.peak.flops / ranks / 1e9);
    if (wide && blas.wider_idle)
      fmt::print("warning: this processor has AVX-512, but OpenBLAS runs its '{}' kernels: {}\n", blas.core,
                 std::getenv("OPENBLAS_CORETYPE") != nullptr ? "unset OPENBLAS_CORETYPE, or set it to SkylakeX"
                                                             : "set OPENBLAS_CORETYPE=SkylakeX");
  }
  if (job.device != "cpu")
    fmt::print("mfu is relative to the {}: {:.1f} TFLOP/s for all ranks\n", ready.peak.source, ready.peak.flops / 1e12);
  if (!ready.dataset) fmt::print("there is no data/{}: the batches are random tokens\n", s.dataset);
  if (ready.pretrained && !ready.resumed)
    fmt::print("initializing from '{}': {}\n", ready.pretrained->path().string(),
               T::Program::described(ready.config, *ready.pretrained));
  for (auto const split : {Split::train, Split::val}) {
    if (!ready.dataset ||
        (ready.dataset->split(split).files().size() == 1 && s.train_data.empty() && s.val_data.empty()))
      continue;
    auto const files = ready.dataset->split(split).files();
    fmt::print("{} tokens: {}, in {}\n", name(split), with_commas(ready.dataset->split(split).size()),
               files.size() == 1 ? fmt::format("'{}'", files[0].path().string())
                                 : fmt::format("{} files, '{}' to '{}'", files.size(), files.front().path().string(),
                                               files.back().path().string()));
  }
  if (auto const* const rows = ready.dataset ? ready.dataset->rows(Split::train) : nullptr) {
    fmt::print("train documents: {}, a row each\n", with_commas(rows->size()));
    if (auto const cut = rows->count_cut(s.block_size); cut > 0)
      fmt::print("note: {} of them {} more than {} tokens (block_size) and {} cut\n", with_commas(cut),
                 cut == 1 ? "has" : "have", s.block_size, cut == 1 ? "is" : "are");
  }
  if (ready.dataset && ready.dataset->meta.path.empty())
    fmt::print("no meta.json: vocabulary of {} ({})\n", ready.config.vocab_size,
               ready.config.vocab_size == Meta{}.vocab_size ? "GPT-2's 50257, padded" : "the model's");
  if (ready.dataset && !ready.dataset->meta.path.empty())
    fmt::print("found vocab_size = {} (inside {})\n", ready.dataset->meta.vocab_size,
               ready.dataset->meta.path.string());
  struct {
    std::int64_t tensors = 0, elements = 0;
  } decayed, others;  // of tensors that train
  std::int64_t all = 0;
  auto const shards = trainer.engine().shards();
  for (std::size_t u = 0; u < shards.size(); ++u) {
    all += shards[u].layout().numel();
    if (shards[u].frozen) continue;
    for (auto const& tensor : shards[u].layout().tensors()) {
      auto& group = tensor.decay ? decayed : others;
      ++group.tensors;
      group.elements += tensor.numel;
    }
  }
  fmt::print("number of parameters: {:.2f}M\n",
             static_cast<double>(T::Program::counted_parameters(ready.config)) / 1e6);
  auto const trained = decayed.elements + others.elements;
  if (trained < all)
    fmt::print("fine-tuning: {} of {} parameters train ({:.2f} %)\n", with_commas(trained), with_commas(all),
               100.0 * static_cast<double>(trained) / static_cast<double>(all));
  fmt::print("num decayed parameter tensors: {}, with {} parameters\n", decayed.tensors, with_commas(decayed.elements));
  fmt::print("num non-decayed parameter tensors: {}, with {} parameters\n", others.tensors,
             with_commas(others.elements));
  std::fflush(stdout);
}

/// [Note: What a program is]
/// A program gives the rooms a class Program of static members; nanogpt::Program is the first. It has
///   Config                        shape of a model: vocab_size, layer_parameters()
///   Opened                        a model whose weights have been found: config(), path()
///   Model<Engine>                 the model on an engine: see Trainer and continue_text for what they call
///   config(settings, vocab_size, model)   the model to train; `model`: that of a run or of weights, if there is one
///   config(run)                   the model of a run
///   model_text(config)            RunState::model; numbers(config): the same for the log, as names and numbers
///   longest_text(settings, config, text)                                  positions that `sample` needs
///   open(settings), fingerprint(opened)   the model that init_from names
///   adopt(settings[, run or opened])      takes the model's shape into the settings
///   leaves_frozen_weights(settings)   checkpoints do not have the parameters of frozen tensors
///   open_base(settings, run)          the weights that a run's frozen tensors have, if its checkpoints do not
///   expect_data(prepared)             throws if the data do not fit the model
///   tokenizer(opened, settings), sample_request(settings, ranks)          of that model
///   described(config, opened), counted_parameters(config), flop_per_token(config, settings)   for texts
///   load_weights(engine, opened), save_model(...), saved_name(settings), save_tokenizer(...)  files
/// and defines all_settings(), set_defaults(), shipped_configs(), program_text(), checked_model(), is_own_config() and
/// planned_bytes().

/// Runs one rank of a program to its end: see run_rank.
/// @tparam Program  see [Note: What a program is]
template <class Program, class P, fsdp::Communicator C>
int run_rank_of(C world, Job const& job) {
  if (job.command == Command::sample) return sample_rank<Program, P>(std::move(world), job);
  Preparation<Program> ready;
  std::optional<JsonLog> log, trace;
  std::optional<LogFile> run_log;
  bool const first = world.rank() == 0;
  try {
    ready = prepare<Program, typename P::Param>(world, job);
    agree(world, [&] {
      bool const training = job.command == Command::train;
      log.emplace(training ? "log_json" : "json", !first     ? std::string()
                                                  : training ? job.settings.log_json
                                                             : job.settings.json);
      trace.emplace("trace", first && training ? job.settings.trace : std::string());
      if (first && training && !job.settings.eval_only)
        run_log.emplace(std::filesystem::path(job.settings.out_dir) / log_file_name);
      else
        run_log.emplace();
      if (training && ready.settings.sample_interval > 0) static_cast<void>(tokenizer_of(ready));
    });
  } catch (AgreedError const& error) {
    return refuse(world.rank(), job, error.what());
  }
  int const ranks = world.size();
  Job resolved = job;
  resolved.settings = ready.settings;
  auto const source = batch_source(resolved.settings, ready, world.rank(), ranks);
  fsdp::Mesh<C> mesh(std::move(world));
  if (job.command == Command::bench && has_variants(resolved.settings))
    return bench_variants<Program, P>(mesh, resolved, ready, *log);
  Trainer<Program, C, P> trainer(mesh, resolved.settings, ready.config, source);
  if (ready.pretrained) Program::load_weights(trainer.engine(), *ready.pretrained);
  if (first) introduce(trainer, resolved, ready, ranks);
  if (job.command == Command::bench && resolved.settings.pieces) return run_pieces(trainer, resolved, ranks);
  if (job.command == Command::bench) {
    bench(trainer, resolved, ready.peak, ranks, *log);
  } else {
    try {
      if (ready.resumed) load_run(trainer, ready);
    } catch (AgreedError const& error) {
      return refuse(trainer.engine().rank(), job, error.what());
    }
    auto const hosts = count_hosts(trainer.engine().world());
    if (first) run_log->write(log_line(run_header(trainer, resolved, ready, hosts)));
    return TrainingLoop(trainer, resolved, ready, *log, *run_log, *trace).run();
  }
  return 0;
}

}  // namespace transformer
