// SPDX-License-Identifier: Apache-2.0
// The subcommand `prepare` tokenizes texts into token files, with their vocabulary.
#include "transformer/data/prepare.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <optional>
#include <system_error>

#include "fsdp/files.hpp"
#include "fsdp/json.hpp"
#include "transformer/data/new_file.hpp"
#include "transformer/launch/cores.hpp"
#include "transformer/report/escape.hpp"
#include "transformer/report/metrics.hpp"
#include "transformer/report/progress.hpp"
#include "transformer/run/choices.hpp"
#include "transformer/run/commands.hpp"
#include "transformer/tokenizer/tokenizer_folder.hpp"

namespace transformer {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t megabyte = 1'000'000;

int threads_of(Settings const& settings) {
  if (settings.threads > 0) return static_cast<int>(settings.threads);
  return std::min(part_of_cores({allowed_cores()}, 0, processor_quota()), 256);
}

/// The vocabulary of a model, as its config.json has it; without that, no limit.
std::int64_t vocab_size_of(fs::path const& model) {
  auto const path = model / "config.json";
  std::error_code error;
  if (!fs::is_regular_file(path, error)) return std::numeric_limits<std::int64_t>::max();
  auto const what = fmt::format("'{}'", path.string());
  auto const json = fsdp::checkpoint::parse_object(fsdp::checkpoint::read_text_file(path), what);
  return fsdp::checkpoint::Fields(json, what).whole("vocab_size", 1, 1'000'000'000);
}

}  // namespace

int run_prepare(Settings const& settings) {
  check_together(settings, Command::prepare, 1);
  PrepareOptions options;
  options.data = settings.data;
  options.folder = fs::path("data") / settings.dataset;
  options.encoder_json = settings.encoder_json;
  options.vocab_bpe = settings.vocab_bpe;
  if (!settings.model.empty()) {
    options.tokenizer = open_tokenizer_folder(settings.model, vocab_size_of(settings.model));
    options.tokenizer_files = tokenizer_files(settings.model);
    options.ends_rows = settings.add_eos;
  }
  options.val_data = settings.val_data;
  options.val_fraction = settings.val_data.empty() ? settings.val_fraction : 0;
  options.threads = threads_of(settings);
  remove_on_signals();
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
  if (prepared.has_val) fmt::print("val has {} tokens\n", with_commas(prepared.val_tokens));
  if (prepared.ignored > 0)
    fmt::print("note: {} file{} in the folder {} left out, for only .txt, .jsonl and .ndjson are read there: '{}'{}\n",
               with_commas(prepared.ignored), prepared.ignored == 1 ? "" : "s", prepared.ignored == 1 ? "is" : "are",
               report::printable(prepared.first_ignored.string()), prepared.ignored == 1 ? "" : " is the first");
  if (prepared.empty > 0)
    fmt::print("note: {} document{} no text or a single token, and {} left out\n", with_commas(prepared.empty),
               prepared.empty == 1 ? " has" : "s have", prepared.empty == 1 ? "is" : "are");
  fmt::print("wrote train.bin{}{} and meta.json to {}\n", prepared.has_val ? ", val.bin" : "",
             prepared.has_rows ? ", their files of rows" : "", options.folder.string());
  if (!prepared.has_val)
    fmt::print("note: there is no val.bin: train needs --val_data=FILE, token files for its evaluations\n");
  return 0;
}

}  // namespace transformer
