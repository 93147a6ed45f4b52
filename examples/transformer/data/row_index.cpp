// SPDX-License-Identifier: Apache-2.0
#include "transformer/data/row_index.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <system_error>

#include "fsdp/error.hpp"
#include "transformer/launch/program.hpp"

namespace transformer {
namespace {

constexpr std::size_t end_bytes = 8;

std::int64_t end_at(std::span<std::byte const> bytes, std::int64_t row) {
  std::uint64_t end = 0;
  for (std::size_t i = 0; i < end_bytes; ++i)
    end |= static_cast<std::uint64_t>(bytes[static_cast<std::size_t>(row) * end_bytes + i]) << (8 * i);
  return static_cast<std::int64_t>(end);
}

}  // namespace

std::filesystem::path rows_path(std::filesystem::path const& tokens) {
  auto path = tokens;
  return path.replace_extension(".rows");
}

void append_row_end(std::string& bytes, std::int64_t end) {
  for (std::size_t i = 0; i < end_bytes; ++i)
    bytes += static_cast<char>(static_cast<std::uint64_t>(end) >> (8 * i) & 0xff);
}

RowIndex::RowIndex(TokenShards const& shards) {
  for (auto const& tokens : shards.files()) {
    auto const path = rows_path(tokens.path());
    std::error_code error;
    if (!std::filesystem::is_regular_file(path, error))
      fsdp::fail<fsdp::ConfigError>("data: '{}' is missing, the file of rows of '{}'; run {} prepare again",
                                    path.string(), tokens.path().string(), program_name);
    auto& file = files_.emplace_back(path);
    auto const bytes = file.bytes();
    auto const rows = static_cast<std::int64_t>(bytes.size() / end_bytes);
    if (rows == 0 || bytes.size() % end_bytes != 0 || end_at(bytes, rows - 1) != tokens.size())
      fsdp::fail<fsdp::ConfigError>("data: '{}': expected rows of 8 bytes, the last of which ends at token {}, got {}",
                                    path.string(), tokens.size(),
                                    rows == 0 || bytes.size() % end_bytes != 0
                                        ? fsdp::formatted("{} bytes", bytes.size())
                                        : fsdp::formatted("one that ends at {}", end_at(bytes, rows - 1)));
    paths_.push_back(path);
    sizes_.push_back(rows);
    tokens_.push_back(tokens.size());
  }
}

std::int64_t RowIndex::size() const { return std::accumulate(sizes_.begin(), sizes_.end(), std::int64_t{0}); }

RowIndex::Row RowIndex::at(std::size_t shard, std::int64_t row) const {
  auto const bytes = files_[shard].bytes();
  Row const found{row == 0 ? 0 : end_at(bytes, row - 1), end_at(bytes, row)};
  if (found.begin < 0 || found.end > tokens_[shard] || found.end - found.begin < 2)
    fsdp::fail<fsdp::ConfigError>(
        "data: '{}': row {} has tokens {} to {} of {}: expected two or more; run {} prepare again",
        paths_[shard].string(), row, found.begin, found.end, tokens_[shard], program_name);
  return found;
}

std::int64_t RowIndex::targets(std::size_t shard, std::int64_t row, std::int64_t block_size) const {
  auto const [begin, end] = at(shard, row);
  return std::min(end - begin - 1, block_size);
}

std::int64_t RowIndex::count_cut(std::int64_t block_size) const {
  std::int64_t cut = 0;
  for (std::size_t shard = 0; shard < sizes_.size(); ++shard) {
    for (std::int64_t row = 0; row < sizes_[shard]; ++row) {
      auto const [begin, end] = at(shard, row);
      if (end - begin - 1 > block_size) ++cut;
    }
  }
  return cut;
}

}  // namespace transformer
