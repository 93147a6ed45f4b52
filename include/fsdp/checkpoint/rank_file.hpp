// SPDX-License-Identifier: Apache-2.0
// One rank's file of a sharded checkpoint: a writer, and a reader that verifies checksums.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/checkpoint/files.hpp"
#include "fsdp/checkpoint/hash.hpp"
#include "fsdp/checkpoint/manifest.hpp"
#include "fsdp/checkpoint/safetensors_header.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint {

/// Writes a rank's file, then its description, whose rename comes last: rank 0 may see it at once, and counts on it.
/// That the description's name is on the disk is rank 0's business.
/// @param slices  in the order in which they are written; `offset` and `checksums` are filled in
/// @param block  called as block(index of the slice, first byte, bytes) in order; returns the bytes, which live until
/// the next call
/// @param mode  of both files, see OutputFile
/// @return the description's text
/// @throws ResourceError
template <class Block>
std::string write_rank_file(std::filesystem::path const& folder, std::string const& name, std::vector<Slice> slices,
                            Block&& block, ::mode_t mode = 0666) {
  std::vector<TensorEntry> entries;
  for (auto const& slice : slices) entries.push_back({slice.key(), slice.dtype, {slice.count}});
  auto const header = safetensors_header(entries, {{"format", "fsdp slices"}}, name);
  RankFile description{name, 0, static_cast<std::int64_t>(header.size()), checksum_of(header), {}};
  OutputFile file(folder / name, mode);
  file.write(header);
  for (std::size_t i = 0; i < slices.size(); ++i) {
    auto& slice = slices[i];
    slice.offset = file.size();
    for (std::int64_t begin = 0; begin < slice.bytes(); begin += block_bytes) {
      auto const bytes = block(i, begin, std::min(block_bytes, slice.bytes() - begin));
      slice.checksums.push_back(checksum_of(bytes));
      file.write(bytes);
    }
  }
  description.bytes = file.size();
  description.slices = std::move(slices);
  file.finish();
  auto text = to_json_text(description);
  auto const announced = folder / description_name(name);
  auto const temporary = std::filesystem::path(announced.string() + ".tmp");
  OutputFile beside(temporary, mode);
  beside.write(text);
  beside.finish();
  sync_folder(folder);
  checkpoint::rename(temporary, announced);
  return text;
}

/// Reads the slices of one rank's file.
class RankFileReader {
 public:
  /// Opens the file, checks its length and its header.
  /// @throws ConfigError
  RankFileReader(std::filesystem::path const& folder, RankFile description)
      : description_(std::move(description)), file_(folder / description_.name) {
    if (file_.size() != description_.bytes)
      fail<ConfigError>("'{}' has {} bytes; expected {}", file_.path().string(), file_.size(), description_.bytes);
    std::vector<std::byte> header(static_cast<std::size_t>(description_.header_bytes));
    file_.read(0, header);
    if (checksum_of(header) != description_.header_checksum)
      fail<ConfigError>("'{}' is damaged: checksum mismatch in its header", file_.path().string());
  }

  /// Visits `count` elements of a slice from its element `first` on, in pieces of at most a block. Reads, and checks,
  /// the blocks that they lie in.
  /// @param visit  called as visit(std::span<std::byte const>, element of the slice that it begins with)
  /// @throws ConfigError if a block's checksum is another
  template <class Visit>
  void read(Slice const& slice, std::int64_t first, std::int64_t count, Visit&& visit) {
    auto const element = static_cast<std::int64_t>(size_of(slice.dtype));
    auto const begin = first * element, end = (first + count) * element;
    for (auto at = begin / block_bytes * block_bytes; at < end; at += block_bytes) {
      block_.resize(static_cast<std::size_t>(std::min(block_bytes, slice.bytes() - at)));
      file_.read(slice.offset + at, block_);
      if (checksum_of(block_) != slice.checksums[static_cast<std::size_t>(at / block_bytes)])
        fail<ConfigError>("'{}' is damaged: checksum mismatch in {} of '{}', elements {} to {}", file_.path().string(),
                          slice.array, slice.tensor, slice.first + at / element,
                          slice.first + (at + static_cast<std::int64_t>(block_.size())) / element);
      auto const from = std::max(begin, at), to = std::min(end, at + static_cast<std::int64_t>(block_.size()));
      visit(std::span<std::byte const>(block_).subspan(static_cast<std::size_t>(from - at),
                                                       static_cast<std::size_t>(to - from)),
            from / element);
    }
  }

  RankFile const& description() const { return description_; }

 private:
  RankFile description_;
  InputFile file_;
  std::vector<std::byte> block_;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint
