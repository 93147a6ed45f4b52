// SPDX-License-Identifier: Apache-2.0
#include "transformer/training/prepared.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <sstream>
#include <string>
#include <system_error>
#include <thread>

#include "fsdp/checkpoint.hpp"
#include "fsdp/error.hpp"
#include "fsdp/host.hpp"
#include "transformer/launch/machine.hpp"
#include "transformer/report/escape.hpp"
#include "transformer/run/choices.hpp"
#include "transformer/training/folder.hpp"
#include "transformer/training/vocabulary.hpp"

namespace transformer {
namespace {

/// @throws fsdp::ConfigError if out_dir holds another run, which this one would destroy, or files of something else
void expect_usable(Prepared const& ready) {
  auto const& settings = ready.settings;
  std::filesystem::path const folder(settings.out_dir);
  auto const continues = [&](std::filesystem::path const& checkpoint) {
    auto const path = checkpoint.has_filename() ? checkpoint : checkpoint.parent_path();
    std::error_code error;
    return std::filesystem::equivalent(fsdp::checkpoint::folder_of(path), folder, error);
  };
  bool const goes_on = ready.snapshot || (ready.resumed && continues(ready.resumed->checkpoint));
  if (goes_on) return;
  expect_folder_for_runs(folder);
  if (settings.overwrite) return expect_replaceable(folder);
  if (auto const note = note_on_replaced_run(folder); !ready.resumed && !note.empty())
    fsdp::fail<fsdp::ConfigError>("setting 'out_dir': '{}' has no checkpoint{}", settings.out_dir, note);
  auto const other = run_in(folder);
  if (other.empty()) return;
  if (ready.resumed)
    fsdp::fail<fsdp::ConfigError>(
        "setting 'out_dir': '{}' holds a run already ({}), and '{}' is a checkpoint of another one; choose another "
        "out_dir",
        settings.out_dir, other, ready.resumed->checkpoint.string());
  fsdp::fail<fsdp::ConfigError>(
      "setting 'out_dir': '{}' holds a run already ({}): {}--overwrite starts a new run there, which replaces the old "
      "one; or choose another out_dir",
      settings.out_dir, other, other == weights_name ? "" : "--init_from=resume continues it; ");
}

std::filesystem::path path_of_lock(Prepared const& ready) {
  return std::filesystem::path(ready.settings.out_dir) / ".train.lock";
}
/// @throws fsdp::ResourceError if another run has it
std::shared_ptr<fsdp::checkpoint::FileLock> locked(std::filesystem::path const& path) {
  return std::make_shared<fsdp::checkpoint::FileLock>(
      path, "another run is training in the folder: wait for it, or take another out_dir");
}

}  // namespace

void expect_vocabulary(Prepared const& ready, std::int64_t vocab_size, std::filesystem::path const& from) {
  auto const& meta = ready.dataset->meta;
  auto const of_data = meta.path.empty() ? gpt2_tokens : meta.vocab_size;
  bool const other = ready.resumed && !meta.path.empty() &&
                     of_data != (ready.resumed->data_vocab_size > 0 ? ready.resumed->data_vocab_size : vocab_size);
  if (of_data > vocab_size || other)
    fsdp::fail<fsdp::ConfigError>(
        "setting 'dataset': '{}' has a vocabulary of {} tokens, but the model in '{}' has a vocabulary of {}",
        ready.settings.dataset, of_data, from.string(), vocab_size);
  if (ready.resumed && !ready.vocabulary.empty() && !ready.resumed->vocabulary.empty() &&
      ready.vocabulary != ready.resumed->vocabulary)
    fsdp::fail<fsdp::ConfigError>(
        "setting 'dataset': '{}' has another vocabulary than the data with which the run in '{}' was trained",
        ready.settings.dataset, from.string());
}

std::string data_text(Prepared const& ready) {
  if (!ready.dataset) return {};
  auto const tokens = [](TokensMark const& mark) {
    return fmt::format("{} tokens in {} file{}, xxh64 {} of samples", mark.tokens, mark.files,
                       mark.files == 1 ? "" : "s", mark.checksum);
  };
  auto const& meta = ready.dataset->meta;
  auto text =
      fmt::format("training data: {}\nvalidation data: {}\nvocabulary: {} tokens, xxh64 {}\n", tokens(ready.data.train),
                  tokens(ready.data.val), meta.vocab_size, ready.vocabulary.empty() ? "unknown" : ready.vocabulary);
  for (auto const& name : meta.tokenizer_files) {
    MappedFile const file(meta.path.parent_path() / name);
    text += fmt::format("file '{}' of the tokenizer: {} bytes, xxh64 {}\n", name, file.bytes().size(),
                        fsdp::checkpoint::checksum_text(fsdp::checkpoint::checksum_of(file.bytes())));
  }
  return text;
}

void expect_same_data(Settings const& settings, std::string const& mine, std::string const& first, int rank) {
  if (mine == first) return;
  std::istringstream ours(mine), theirs(first);
  std::string line, expected;
  do {
    line.clear(), expected.clear();
    std::getline(ours, line);
    std::getline(theirs, expected);
  } while (line == expected);
  fsdp::fail<fsdp::ConfigError>(
      "setting '{}': rank {} on {} has other data than rank 0 under the same name: {}; rank 0 has {}. Copy the files "
      "of "
      "rank 0's machine to all machines",
      settings.train_data.empty() ? "dataset" : "train_data", rank, host_name(), line.empty() ? "nothing" : line,
      expected.empty() ? "nothing" : expected);
}

void expect_long_files(Prepared const& ready) {
  for (auto const split : {Split::train, Split::val}) {
    if (ready.dataset->rows(split) != nullptr) continue;
    for (auto const& tokens : ready.dataset->split(split).files()) {
      if (tokens.size() <= ready.settings.block_size)
        fsdp::fail<fsdp::ConfigError>(
            "setting 'block_size': {} is too long for '{}': expected a file with {} or more tokens, got {}; use a "
            "smaller block_size, or check whether the file is truncated",
            ready.settings.block_size, tokens.path().string(), ready.settings.block_size + 1, tokens.size());
    }
  }
}

void wait_for_out_dir(Prepared& ready) {
  auto const path = path_of_lock(ready);
  std::error_code error;
  if (!std::filesystem::exists(path, error)) return;
  auto const patience = std::min<std::chrono::nanoseconds>(std::chrono::minutes(2), fsdp::host::wait_deadline() / 2);
  auto const until = fsdp::AwakeClock::now() + patience;
  for (bool has_said = false;; has_said = true) try {
      ready.lock = locked(path);
      return;
    } catch (fsdp::ResourceError const& taken) {
      if (fsdp::AwakeClock::now() >= until) throw;
      if (!has_said) {
        fmt::print("{}; waiting for up to {} s\n", report::printable(taken.what()),
                   std::chrono::floor<std::chrono::seconds>(patience).count());
        std::fflush(stdout);
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
    }
}

void take_out_dir(Prepared& ready) {
  if (ready.has_out_dir) return;
  auto const path = path_of_lock(ready);
  std::error_code error;
  if (!std::filesystem::exists(path, error)) expect_usable(ready);  // a folder that is refused gets no lock
  if (!ready.lock) ready.lock = locked(path);
  expect_usable(ready);  // nobody changes it from here on
  ready.has_out_dir = true;
}

}  // namespace transformer
