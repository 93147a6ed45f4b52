// SPDX-License-Identifier: Apache-2.0
// Documents as rows: where each document of a token file begins and ends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "transformer/data/token_file.hpp"
#include "transformer/data/token_shards.hpp"

namespace transformer {

/// [Note: Documents as rows]
/// A row of a batch is one document: its tokens up to the block size, then padding. The loss of a step is the sum over
/// the step's targets by their number, over all micro-steps and ranks, as it would be in one batch; padding has no
/// targets. Every rank knows the lengths of all rows from the index, so it computes that number without an exchange.
///
/// `prepare` writes a file of rows beside the token file: train.rows beside train.bin. It has a uint64 (little-endian)
/// for each row, the token behind the row's last one. The first row begins at token 0.

/// The rows of a split, over all of its token files.
class RowIndex {
 public:
  /// @throws fsdp::ConfigError if a file of rows is missing or does not end where its token file does
  explicit RowIndex(TokenShards const& shards);

  /// Rows of all files.
  std::int64_t size() const;
  /// Rows of each file.
  std::span<std::int64_t const> sizes() const { return sizes_; }

  /// The tokens of a row, [begin, end), in its file.
  struct Row {
    std::int64_t begin = 0, end = 0;
  };
  /// @pre 0 <= row < sizes()[shard]
  /// @throws fsdp::ConfigError if the file of rows is damaged there
  Row at(std::size_t shard, std::int64_t row) const;
  /// Tokens that a row of a batch predicts: those behind the first, at most block_size.
  std::int64_t targets(std::size_t shard, std::int64_t row, std::int64_t block_size) const;
  /// Rows of more than block_size + 1 tokens, which are cut. Reads all files of rows.
  std::int64_t count_cut(std::int64_t block_size) const;

  /// The files as they are stored, for checksums.
  std::span<std::byte const> bytes(std::size_t shard) const { return files_[shard].bytes(); }

 private:
  std::vector<std::filesystem::path> paths_;
  std::vector<MappedFile> files_;
  std::vector<std::int64_t> sizes_, tokens_;  ///< of each file: rows, tokens
};

/// The file of rows beside a token file.
std::filesystem::path rows_path(std::filesystem::path const& tokens);

/// Appends the ends of rows to the contents of a file of rows.
void append_row_end(std::string& bytes, std::int64_t end);

}  // namespace transformer
