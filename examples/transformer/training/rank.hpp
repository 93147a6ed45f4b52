// SPDX-License-Identifier: Apache-2.0
// One rank of a program: preparation, then the training loop or the benchmark; or samples.
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>

#include "fsdp/fsdp.hpp"
#include "transformer/launch/job.hpp"
#include "transformer/launch/program.hpp"
#include "transformer/launch/refusals.hpp"
#include "transformer/math/blas.hpp"
#include "transformer/math/peak.hpp"
#include "transformer/report/log_lines.hpp"
#include "transformer/run/bench.hpp"
#include "transformer/run/pieces.hpp"
#include "transformer/sampling/sampler.hpp"
#include "transformer/train.hpp"
#include "transformer/training/bench_variants.hpp"
#include "transformer/training/header.hpp"
#include "transformer/training/introduction.hpp"
#include "transformer/training/load.hpp"
#include "transformer/training/preparation.hpp"
#include "transformer/training/samples.hpp"
#include "transformer/training/session.hpp"

namespace transformer {

/// The facts that `introduce` needs of a trainer.
template <class T>
Introduction introduction_of(T& trainer, Job const& job, Preparation<typename T::Program> const& ready, int ranks) {
  Introduction about;
  about.ranks = ranks;
  about.strategy = trainer.engine().strategy().name;
  if (job.device == "cpu") about.blas = blas_info();
  if (ready.pretrained && !ready.resumed)
    about.start = fmt::format("initializing from '{}': {}\n", ready.pretrained->path().string(),
                              T::Program::described(ready.config, *ready.pretrained));
  about.vocab_size = ready.config.vocab_size;
  about.parameters = T::Program::counted_parameters(ready.config);
  auto const shards = trainer.engine().shards();
  for (std::size_t u = 0; u < shards.size(); ++u) {
    about.elements += shards[u].layout().numel();
    if (shards[u].frozen) continue;
    for (auto const& tensor : shards[u].layout().tensors()) {
      auto& group = tensor.decay ? about.decayed : about.others;
      ++group.tensors;
      group.elements += tensor.numel;
    }
  }
  return about;
}

/// [Note: What a program is]
/// Each program has a class Program of static members, such as nanogpt::Program. It has
///   Config                        shape of a model: vocab_size, layer_parameters()
///   Opened                        a model whose weights have been found: config, path()
///   Model<Engine>                 the model on an engine: see Trainer and continue_text for what they call
///   config(settings, vocab_size, model)   the model to train; `model`: that of a run or of weights, if there is one
///   config(run)                   the model of a run
///   model_text(config)            RunState::model; numbers(config): the same for the log, as names and numbers
///   longest_text(settings, config, text)                                  positions that `sample` needs
///   open(settings), fingerprint(opened)   the model that init_from names
///   adopt(settings[, run or opened])      takes the model's shape into the settings
///   origin(run or opened)             RunState::origin
///   leaves_frozen_weights(settings)   checkpoints do not have the parameters of frozen tensors
///   open_base(settings, run)          the weights that a run's frozen tensors have, if its checkpoints do not
///   expect_data(prepared)             throws if the data do not fit the model; may open their tokenizer
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
  if (first) introduce(introduction_of(trainer, resolved, ready, ranks), resolved, ready);
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
    Session session(trainer, resolved, ready, *log, *run_log, *trace);
    try {
      return train(trainer, resolved.settings, session);
    } catch (std::exception const& error) {
      session.log_error(error.what());
      throw;
    }
  }
  return 0;
}

}  // namespace transformer
