// SPDX-License-Identifier: Apache-2.0
// Compares every token of a data set with the vocabulary, once; later runs skip large files that were checked.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "fsdp/error.hpp"
#include "transformer/data/dataset.hpp"
#include "transformer/launch/agree.hpp"

namespace transformer {

/// A token file and the largest of its tokens.
struct CheckedFile {
  TokenFile const* file = nullptr;
  std::int64_t largest = -1;
};

/// Smaller files are checked in each run, in less than a tenth of a second.
inline constexpr std::uint64_t least_remembered_bytes = std::uint64_t{16} << 20;

/// The file's largest token, if it is remembered of a file with this path, size and time of last change.
std::optional<std::int64_t> remembered_largest(TokenFile const& file);

/// Remembers files of least_remembered_bytes or more, beside them (.nanogpt_tokens.json) or, where that cannot be
/// written, in the cache folder. Not those that have changed since they were opened.
void remember_largest(std::vector<CheckedFile> const& files);

/// Told how many bytes of how many this rank has checked.
using CheckProgress = std::function<void(std::uint64_t done, std::uint64_t total)>;

/// The largest token of the rank's part of each file.
/// @throws fsdp::ConfigError naming file, position and token of the first that is not below `vocab_size`
std::vector<std::int64_t> check_part(std::vector<TokenFile const*> const& files, std::int64_t vocab_size, int rank,
                                     int ranks, CheckProgress const& progress);

/// Checks that all tokens of the data are below `vocab_size`: each rank a part of the files that some rank does not
/// remember.
/// @param dataset  null: this rank has no data, and expects that no rank has
/// @throws AgreedError on every rank if one is not
/// @note Collective: yes; blocks.
template <class C>
void check_tokens(C& world, Dataset const* dataset, std::int64_t vocab_size, CheckProgress const& progress) {
  std::vector<TokenFile const*> files;
  std::string known;  // a digit a file
  for (auto const split : {Split::train, Split::val}) {
    if (dataset == nullptr) break;
    for (auto const& file : dataset->split(split).files()) {
      auto const largest = remembered_largest(file);
      files.push_back(&file);
      known += largest && *largest < vocab_size ? '1' : '0';
    }
  }
  auto const of_ranks = world.exchange(known, "token files that were checked before");
  std::vector<TokenFile const*> unknown;
  for (std::size_t rank = 0; rank < of_ranks.size(); ++rank)
    if (of_ranks[rank].size() != of_ranks[0].size())
      fsdp::fail<AgreedError>("data: rank 0 finds {} token files, rank {} finds {}: expected the same on all ranks",
                              of_ranks[0].size(), rank, of_ranks[rank].size());
  for (std::size_t i = 0; i < files.size(); ++i)
    for (auto const& digits : of_ranks)
      if (digits[i] == '0') {
        unknown.push_back(files[i]);
        break;
      }
  if (unknown.empty()) return;
  std::string mine;
  agree(world, [&] {
    for (auto const largest : check_part(unknown, vocab_size, world.rank(), world.size(), progress))
      mine += std::to_string(largest) + ' ';
  });
  std::vector<CheckedFile> checked;
  for (auto const* const file : unknown) checked.push_back({file});
  for (auto const& text : world.exchange(mine, "largest tokens")) {
    std::istringstream stream(text);
    for (auto& file : checked) {
      std::int64_t largest = -1;
      stream >> largest;
      file.largest = std::max(file.largest, largest);
    }
  }
  // Rank 0 first; then those that do not find what it wrote, on machines with disks of their own.
  if (world.rank() == 0) remember_largest(checked);
  if (world.size() == 1) return;
  world.exchange("", "token checks");
  std::erase_if(checked, [](CheckedFile const& file) { return remembered_largest(*file.file).has_value(); });
  if (world.rank() != 0) remember_largest(checked);
}

}  // namespace transformer
