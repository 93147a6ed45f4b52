// SPDX-License-Identifier: Apache-2.0
// Marks by which a checkpoint recognises the data that its run was trained on.
#include "transformer/run/data_mark.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <nlohmann/json.hpp>

#include "fsdp/checkpoint.hpp"
#include "fsdp/error.hpp"
#include "fsdp/json.hpp"

namespace transformer {
namespace {

using fsdp::checkpoint::Json;

constexpr std::size_t block = 64 << 10;  // bytes

/// @param rows  of the shards; null: they have none
TokensMark mark_of(TokenShards const& shards, RowIndex const* rows) {
  std::string parts;
  std::size_t shard = 0;
  for (auto const& file : shards.files()) {
    auto const bytes = file.tokens();
    parts += fmt::format("{} tokens of {} bytes:", file.size(), file.token_bytes());
    auto const add = [&](std::size_t first, std::size_t count) {
      parts += fmt::format(" {:016x}", fsdp::checkpoint::checksum_of(bytes.subspan(first, count)));
    };
    if (bytes.size() <= 3 * block) {
      add(0, bytes.size());
    } else {
      add(0, block);
      add(bytes.size() / 2, block);
      add(bytes.size() - block, block);
    }
    if (rows != nullptr) parts += fmt::format(" rows {:016x}", fsdp::checkpoint::checksum_of(rows->bytes(shard)));
    ++shard;
    parts += '\n';
  }
  return {shards.size(), static_cast<std::int64_t>(shards.files().size()),
          fsdp::checkpoint::checksum_text(fsdp::checkpoint::checksum_of(parts))};
}

Json mark_json(TokensMark const& mark) {
  return {{"tokens", mark.tokens}, {"files", mark.files}, {"xxh64", mark.checksum}};
}

TokensMark mark_from(Json const& json, std::string_view what) {
  constexpr auto most = std::numeric_limits<std::int64_t>::max();
  fsdp::checkpoint::Fields const fields(json, what);
  return {fields.whole("tokens", 0, most), fields.whole("files", 0, most),
          fsdp::checkpoint::checksum_text(fields.checksum("xxh64"))};
}

std::string in_words(TokensMark const& mark) {
  return fmt::format("{} tokens in {} file{}", mark.tokens, mark.files, mark.files == 1 ? "" : "s");
}

}  // namespace

RunData mark_of(Dataset const& dataset) {
  return {mark_of(dataset.train, dataset.rows(Split::train)), mark_of(dataset.val, dataset.rows(Split::val))};
}

Json run_data_json(RunData const& data) { return {{"train", mark_json(data.train)}, {"val", mark_json(data.val)}}; }

RunData run_data_from(Json const& json, std::string_view what) {
  fsdp::checkpoint::Fields const fields(json, what);
  return {mark_from(fields.object("train"), what), mark_from(fields.object("val"), what)};
}

std::vector<std::string> compare_data(Settings const& settings, RunData const& had, RunData const& has,
                                      std::string_view from) {
  std::vector<std::string> lines;
  auto const compare = [&](bool train, TokensMark const& before, TokensMark const& now) {
    if (before.tokens == 0 || before == now) return;
    bool const as_many = before.tokens == now.tokens && before.files == now.files;
    auto const differs = fmt::format("it had {}, now there are {}", in_words(before),
                                     as_many ? std::string("as many, with other contents") : in_words(now));
    bool const asked =
        settings.was_given("dataset") || settings.was_given("train_data") || (!train && settings.was_given("val_data"));
    if (!asked)
      fsdp::fail<fsdp::ConfigError>(
          "setting '{}': the {} data are not those of the run in '{}': {}. Restore the old data, or name the data with "
          "which to continue: --dataset=NAME, --train_data=FILES{}",
          settings.train_data.empty() ? "dataset" : "train_data", train ? "training" : "validation", from, differs,
          train ? "" : " or --val_data=FILES");
    lines.push_back(fmt::format("warning: the {} data are not those of the run in '{}': {}; {}",
                                train ? "training" : "validation", from, differs,
                                train ? "batches are drawn from the new data from here on"
                                      : "do not compare validation losses with earlier ones"));
  };
  compare(true, had.train, has.train);
  compare(false, had.val, has.val);
  return lines;
}

}  // namespace transformer
