// SPDX-License-Identifier: Apache-2.0
// nanogpt prepare: texts become token files and a vocabulary.
#include "prepare_data.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <optional>

#include "commands.hpp"
#include "cores.hpp"
#include "metrics.hpp"
#include "progress.hpp"

namespace nanogpt {
namespace {

constexpr std::uint64_t megabyte = 1'000'000;

int threads_of(Settings const& settings) {
  if (settings.threads > 0) return static_cast<int>(settings.threads);
  return std::min(part_of_cores({allowed_cores()}, 0, processor_quota()), 256);
}

}  // namespace

int run_prepare(Settings const& settings) {
  check_together(settings, Command::prepare, 1);
  PrepareOptions options;
  options.data = settings.data;
  options.folder = std::filesystem::path("data") / settings.dataset;
  options.encoder_json = settings.encoder_json;
  options.vocab_bpe = settings.vocab_bpe;
  options.val_fraction = settings.val_fraction;
  options.threads = threads_of(settings);
  std::optional<Progress> bar;
  options.progress = [&](std::uint64_t done, std::uint64_t total) {
    if (!bar) bar.emplace(true, static_cast<std::int64_t>(total / megabyte));
    bar->advance(static_cast<std::int64_t>(done / megabyte), " MB");
  };
  auto const prepared = prepare_data(options);
  bar.reset();
  if (prepared.documents > 0) fmt::print("documents: {}\n", with_commas(prepared.documents));
  fmt::print("length of dataset in characters: {}\n", with_commas(prepared.characters));
  fmt::print("vocab size: {}\n", with_commas(prepared.vocab_size));
  fmt::print("train has {} tokens\n", with_commas(prepared.train_tokens));
  fmt::print("val has {} tokens\n", with_commas(prepared.val_tokens));
  fmt::print("wrote train.bin, val.bin and meta.json to {}\n", options.folder.string());
  return 0;
}

}  // namespace nanogpt
