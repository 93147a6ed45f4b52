// SPDX-License-Identifier: Apache-2.0
// Prepares a run: the ranks agree on settings, data, model and peak before training.
#pragma once

#include <fmt/format.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "fsdp/communicator.hpp"
#include "fsdp/engine.hpp"
#include "fsdp/error.hpp"
#include "transformer/data/batch_source.hpp"
#include "transformer/data/dataset.hpp"
#include "transformer/data/token_checks.hpp"
#include "transformer/launch/job.hpp"
#include "transformer/launch/refusals.hpp"
#include "transformer/math/peak.hpp"
#include "transformer/report/log_lines.hpp"
#include "transformer/run/choices.hpp"
#include "transformer/run/data_mark.hpp"
#include "transformer/run/table.hpp"
#include "transformer/training/folder.hpp"
#include "transformer/training/prepared.hpp"
#include "transformer/training/settings_of_run.hpp"
#include "transformer/training/snapshots.hpp"
#include "transformer/training/state.hpp"
#include "transformer/training/vocabulary.hpp"
#include "transformer/training/whole_checkpoints.hpp"

namespace transformer {

/// The result of preparation, on which the ranks agree.
/// @tparam Program  see [Note: What a program is]
template <class Program>
struct Preparation : Prepared {
  typename Program::Config config;
  std::optional<typename Program::Opened> pretrained;  ///< the weights that training begins with
};

/// Checks the data's tokens; rank 0 says how far that is, every few seconds, where it takes longer.
/// @throws AgreedError on every rank if one lies outside the vocabulary
/// @note Collective: yes; blocks.
template <class C, class Program>
void check_data(C& world, Preparation<Program> const& ready) {
  using Clock = std::chrono::steady_clock;
  auto next = Clock::now() + std::chrono::seconds(2);
  auto const say = [&](std::uint64_t done, std::uint64_t total) {
    auto const now = Clock::now();
    if (world.rank() != 0 || now < next) return;
    next = now + std::chrono::seconds(5);
    fmt::print("checking all tokens of the data (later runs skip this): {:.0f} % of {:.2f} GB\n",
               100 * static_cast<double>(done) / static_cast<double>(total),
               static_cast<double>(total) * world.size() / 1e9);
    std::fflush(stdout);
  };
  check_tokens(world, ready.dataset ? &*ready.dataset : nullptr, ready.config.vocab_size, say);
}

/// @throws AgreedError on every rank if one has other data than rank 0: machines may have other files of the same name
/// @note Collective: yes; blocks. Rank 0's text goes to all ranks.
template <class C>
void expect_equal_data(C& world, Prepared const& ready) {
  std::string mine;
  agree(world, [&] { mine = data_text(ready); });
  auto const first = fsdp::comm::ask_first_rank(world, mine, "the data", fsdp::comm::text_of_first);
  agree(world, [&] { expect_same_data(ready.settings, mine, first, world.rank()); });
}

/// @param mark  of rank 0
/// @throws AgreedError on every rank if one does not see rank 0's mark in the folder
/// @note Collective: yes; blocks.
template <class C>
void expect_shared_out_dir(C& world, std::filesystem::path const& out_dir, std::string const& mark) {
  auto const first = fsdp::comm::ask_first_rank(world, mark, "out_dir", fsdp::comm::text_of_first);
  agree(world, [&] { expect_mark(out_dir, first, world.rank()); });
}

/// Opens and checks what the run needs. @throws AgreedError on every rank if one of them finds a fault
/// @tparam T  what the run computes in
template <class Program, class T, class C>
Preparation<Program> prepare(C& world, Job const& job) {
  Preparation<Program> ready;
  auto& settings = ready.settings;
  settings = job.settings;
  bool const training = job.command == Command::train;
  if (training && !settings.eval_only && is_auto(settings))
    agree(world, [&] {
      if (world.rank() == 0) wait_for_out_dir(ready);
    });
  if (training) look_for_snapshot(world, ready);
  agree(world, [&] {
    if (training && may_resume(settings)) {
      ChosenRun chosen;
      if (!ready.snapshot) {
        chosen = ready.on_disk ? std::move(*ready.on_disk) : choose_run(settings, world.rank() == 0);
        ready.resumed = std::move(chosen.run);
      }
      if (!ready.resumed && settings.init_from == "resume")
        fsdp::fail<fsdp::ConfigError>("setting 'init_from': there is no checkpoint in '{}' to resume from{}",
                                      settings.out_dir, note_on_replaced_run(settings.out_dir));
      if (!chosen.note.empty()) ready.lines.push_back(std::move(chosen.note));
      if (ready.resumed) {
        for (auto& line : adopt_settings(settings, *ready.resumed)) ready.lines.push_back(std::move(line));
        if (world.rank() == 0 &&
            was_abandoned(std::filesystem::path(settings.out_dir) / log_file_name, ready.resumed->start))
          ready.lines.push_back(fmt::format(
              "note: the last start in '{}' began a new run and saved no checkpoint; this one continues the run before "
              "it, in '{}'",
              settings.out_dir, ready.resumed->checkpoint.string()));
        Program::adopt(settings, *ready.resumed);
        ready.base = ready.resumed->base;
        ready.origin = Program::origin(*ready.resumed);
        if (!ready.base.empty()) ready.pretrained = Program::open_base(settings, *ready.resumed);
        if (auto const old = replaced_run_in(settings.out_dir); !old.empty())
          ready.lines.push_back(
              fmt::format("note: '{}' has the run that this one has replaced; remove it if it is not needed any more",
                          old.string()));
      }
    }
    if (training && !ready.resumed && names_weights(first_start(settings))) {
      ready.pretrained = Program::open(settings);
      Program::adopt(settings, *ready.pretrained);
      ready.origin = Program::origin(*ready.pretrained);
      if (Program::leaves_frozen_weights(settings)) ready.base = Program::fingerprint(*ready.pretrained);
    }
    if (!training) Program::adopt(settings);
    check_together(settings, job.command, world.size());
    if (training && !ready.resumed && !ready.pretrained && (settings.lora_rank > 0 || settings.freeze_layers != 0))
      fsdp::fail<fsdp::ConfigError>(
          "setting '{}': fine-tuning starts from weights; expected --init_from=WEIGHTS, --init_from=auto:WEIGHTS or "
          "--init_from=resume, got {}",
          settings.lora_rank > 0 ? "lora_rank" : "freeze_layers", settings.init_from);
    std::error_code ignored;
    bool const keeps = training && !settings.eval_only && world.rank() == 0;
    if (keeps && std::filesystem::exists(settings.out_dir, ignored)) take_out_dir(ready);  // before long checks
    if (training || !settings.train_data.empty() ||
        std::filesystem::is_directory(std::filesystem::path("data") / settings.dataset, ignored))
      ready.dataset.emplace(open_dataset({settings.dataset, settings.train_data, settings.val_data}, training));
    std::optional<typename Program::Config> model;  // with which training begins
    if (ready.resumed) model = Program::config(*ready.resumed);
    if (!model && ready.pretrained) model = ready.pretrained->config;
    ready.config = Program::config(settings, ready.dataset ? ready.dataset->meta.vocab_size : Meta{}.vocab_size, model);
    if (ready.dataset) {
      ready.vocabulary = vocabulary_checksum(ready.dataset->meta);
      ready.data = mark_of(*ready.dataset);
    }
    if (ready.resumed) {
      auto const& run = *ready.resumed;
      expect_vocabulary(ready, model->vocab_size, run.checkpoint);
      for (auto& line : compare_data(settings, run.data, ready.data, run.checkpoint.string()))
        ready.lines.push_back(std::move(line));
    }
    if (ready.pretrained) expect_vocabulary(ready, model->vocab_size, ready.pretrained->path());
    if (!ready.dataset) return;
    Program::expect_data(ready);
    expect_long_files(ready);
  });
  // Not before all ranks have opened their files: agree() has told them so.
  check_data(world, ready);
  bool const saves = training && !settings.eval_only;
  std::optional<FolderMark> mark;
  agree(world, [&] {
    if (!saves || world.rank() != 0) return;
    prepare_out_dir(settings.out_dir);
    take_out_dir(ready);
    mark.emplace(settings.out_dir);
  });
  if (saves) expect_shared_out_dir(world, settings.out_dir, mark ? mark->text() : std::string());
  mark.reset();
  agree(world, [&] { expect_same_settings(world, settings); });
  expect_equal_data(world, ready);
  agree(world, [&] {
    auto const from = ready.snapshot     ? ready.snapshot->name() + " " + ready.snapshot->id
                      : ready.resumed    ? ready.resumed->checkpoint.string()
                      : ready.pretrained ? "weights " + Program::fingerprint(*ready.pretrained)
                                         : "no checkpoint";
    fsdp::detail::expect_equal_texts(world, from, "where training starts");
  });
  if (training && settings.snapshot_interval > 0 && !settings.eval_only)
    expect_snapshot_folder(world, settings, ready.lines);
  ready.peak = measure_peak<T>(world, 1e12 * settings.peak_tflops);
  return ready;
}

template <class Program>
BatchSource batch_source(Settings const& settings, Preparation<Program> const& ready, int rank, int ranks) {
  BatchSource source;
  source.dataset = ready.dataset ? &*ready.dataset : nullptr;
  source.vocab_size = ready.config.vocab_size;
  source.seed = static_cast<std::uint64_t>(settings.seed);
  source.random_windows = settings.sampling == "random";
  source.rank = rank;
  source.ranks = ranks;
  source.batch_size = settings.batch_size;
  source.gradient_accumulation_steps = settings.gradient_accumulation_steps;
  source.block_size = settings.block_size;
  return source;
}

}  // namespace transformer
