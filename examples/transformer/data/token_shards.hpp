// SPDX-License-Identifier: Apache-2.0
// The token files of a split: one, or several shards.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "transformer/data/token_file.hpp"

namespace transformer {

enum class Split : unsigned char { train, val };
constexpr std::string_view name(Split split) { return split == Split::train ? "train" : "val"; }

/// The token files that `text` names, in the order of their names.
/// @param text  a file; a pattern with *, ? or [...]; or a folder: its train.bin or val.bin, or, without one, its files
///              *.bin with "train" or "val" in their names
/// @throws fsdp::ConfigError if no file matches a pattern
std::vector<std::filesystem::path> find_token_files(std::string const& text, Split split);

/// The tokens of a split: those of one file, or of several, the shards, one after the other. A sequence lies in one
/// shard.
class TokenShards {
 public:
  /// @throws fsdp::ConfigError (see TokenFile)
  TokenShards(std::vector<std::filesystem::path> const& paths, std::size_t token_bytes);

  /// Tokens of all shards.
  std::int64_t size() const;
  std::span<TokenFile const> files() const { return files_; }
  TokenFile const& file(std::size_t shard) const { return files_[shard]; }
  /// Tokens of each shard.
  std::span<std::int64_t const> sizes() const { return sizes_; }

 private:
  std::vector<TokenFile> files_;
  std::vector<std::int64_t> sizes_;
};

}  // namespace transformer
