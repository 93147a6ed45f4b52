// SPDX-License-Identifier: Apache-2.0
// Files of a sharded checkpoint: a writer of one rank's file, and readers of parts of tensors, whatever ranks wrote
// them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/detail/checkpoint/manifest.hpp"
#include "fsdp/error.hpp"
#include "fsdp/files.hpp"
#include "fsdp/safetensors.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint {

/// Writes a rank's file, then its description, whose rename comes last: rank 0 may see it at once, and counts on it.
/// Rank 0 synchronises the folder when all ranks have written, so that this name is on the disk.
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
  RankFileReader(std::filesystem::path const& folder, RankFile description);

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

/// Descriptions of a checkpoint's files that its folder lacks.
struct FolderTexts {
  std::string manifest;                             ///< empty: the folder has it
  std::map<std::string, std::string> descriptions;  ///< by the name of the file that they describe
};

/// Reads a sharded checkpoint. It opens only the files that it needs. Used by one thread.
class ShardedReader {
 public:
  /// @param manifest      of the folder
  /// @param descriptions  that the folder lacks: see FolderTexts
  /// @throws ConfigError if a description is missing, is not the one that was written, or slices do not cover every
  /// tensor of every array exactly
  ShardedReader(std::filesystem::path folder, Manifest manifest,
                std::map<std::string, std::string> const& descriptions = {});

  Manifest const& manifest() const { return manifest_; }
  /// Optimizers keep nothing for tensors that were frozen, or that another optimizer owned; of format 3, frozen tensors
  /// have no parameters either.
  bool has(std::string_view array, std::string_view tensor) const;

  /// Visits elements [first, first + count) of a tensor, in order, in pieces; every byte has been checked.
  /// @pre has(array, tensor)
  /// @param visit  called as visit(DType, std::span<std::byte const>, element of the tensor that the piece begins with)
  /// @throws ConfigError
  template <class Visit>
  void read(std::string_view array, std::string_view tensor, std::int64_t first, std::int64_t count, Visit&& visit) {
    auto const& parts = parts_.at({std::string(array), std::string(tensor)});
    auto part = std::upper_bound(parts.begin(), parts.end(), first,
                                 [](std::int64_t at, Part const& each) { return at < each.end(); });
    for (auto const end = first + count; first < end; ++part) {
      auto const& slice = *part->slice;
      auto const stop = std::min(end, part->end());
      reader(part->file).read(slice, first - slice.first, stop - first, [&](auto bytes, std::int64_t at) {
        visit(slice.dtype, bytes, slice.first + at);
      });
      first = stop;
    }
  }
  /// Calls `act(name)` for each file that has some of elements [first, first + count). @pre has(array, tensor)
  template <class Act>
  void for_each_file(std::string_view array, std::string_view tensor, std::int64_t first, std::int64_t count,
                     Act&& act) const {
    for (auto const& part : parts_.at({std::string(array), std::string(tensor)}))
      if (part.slice->first < first + count && first < part.end()) act(descriptions_[part.file].name);
  }
  /// Reads elements [first, first + out.size()) of a tensor as fp32.
  void read(std::string_view array, std::string_view tensor, std::int64_t first, std::span<float> out);

 private:
  struct Part {
    Slice const* slice;
    std::size_t file;
    std::int64_t end() const { return slice->first + slice->count; }
  };

  template <class T>
  static void widen(std::span<std::byte const> bytes, float* to) {
    for (std::size_t i = 0; i < bytes.size() / sizeof(T); ++i) {
      T value;
      std::memcpy(&value, bytes.data() + i * sizeof(T), sizeof(T));
      to[i] = static_cast<float>(value);
    }
  }

  void place_slices();
  DType type_of(ArrayEntry const& array, std::string const& tensor) const;
  [[noreturn]] void wrong(std::string_view array, std::string_view tensor, std::string_view how) const;
  RankFileReader& reader(std::size_t file);

  std::filesystem::path folder_;
  Manifest manifest_;
  std::vector<RankFile> descriptions_;
  std::vector<std::unique_ptr<RankFileReader>> readers_;                    // of files that were needed
  std::map<std::pair<std::string, std::string>, std::vector<Part>> parts_;  // by array and tensor, in order
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint

#if FSDP_CHECKPOINT_BODIES

namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint {

FSDP_BODY RankFileReader::RankFileReader(std::filesystem::path const& folder, RankFile description)
    : description_(std::move(description)), file_(folder / description_.name) {
  if (file_.size() != description_.bytes)
    fail<ConfigError>("'{}' has {} bytes; expected {}", file_.path().string(), file_.size(), description_.bytes);
  std::vector<std::byte> header(static_cast<std::size_t>(description_.header_bytes));
  file_.read(0, header);
  if (checksum_of(header) != description_.header_checksum)
    fail<ConfigError>("'{}' is damaged: checksum mismatch in its header", file_.path().string());
}

FSDP_BODY ShardedReader::ShardedReader(std::filesystem::path folder, Manifest manifest,
                                       std::map<std::string, std::string> const& descriptions)
    : folder_(std::move(folder)), manifest_(std::move(manifest)) {
  for (auto const& [name, checksum] : manifest_.files) {
    auto const path = folder_ / description_name(name);
    auto const given = descriptions.find(name);
    auto const text = given != descriptions.end() ? given->second : read_text_file(path);
    auto const what = formatted("'{}'", path.string());
    if (checksum_of(text) != checksum) fail<ConfigError>("{} is damaged: checksum mismatch", what);
    descriptions_.push_back(parse_rank_file(text, what));
    if (descriptions_.back().name != name)
      fail<ConfigError>("{} describes file '{}', expected '{}'", what, descriptions_.back().name, name);
  }
  readers_.resize(descriptions_.size());
  place_slices();
}

FSDP_BODY bool ShardedReader::has(std::string_view array, std::string_view tensor) const {
  auto const lists = [](std::vector<std::string> const& names, std::string_view name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  if (array == parameters_array) return !manifest_.without_frozen || !lists(manifest_.frozen, tensor);
  for (auto const& part : manifest_.parts)
    if (lists(part.arrays, array)) return lists(part.tensors, tensor);
  return false;
}

FSDP_BODY void ShardedReader::read(std::string_view array, std::string_view tensor, std::int64_t first,
                                   std::span<float> out) {
  read(array, tensor, first, static_cast<std::int64_t>(out.size()),
       [&](DType type, std::span<std::byte const> bytes, std::int64_t at) {
         auto* const to = out.data() + (at - first);
         if (type == DType::f32) std::memcpy(to, bytes.data(), bytes.size());
         if (type == DType::bf16) widen<bf16>(bytes, to);
         if (type == DType::f16) widen<fp16>(bytes, to);
       });
}

FSDP_BODY void ShardedReader::place_slices() {
  for (auto const& array : manifest_.arrays)
    for (auto const& tensor : manifest_.tensors)
      if (!parts_.try_emplace({array.name, tensor.name}).second) wrong(array.name, tensor.name, "are listed twice");
  for (std::size_t file = 0; file < descriptions_.size(); ++file) {
    for (auto const& slice : descriptions_[file].slices) {
      auto const found = parts_.find({slice.array, slice.tensor});
      if (found == parts_.end())
        wrong(slice.array, slice.tensor, "have slices, but the checkpoint does not list this tensor");
      if (slice.count > 0) found->second.push_back({&slice, file});
    }
  }
  for (auto const& array : manifest_.arrays) {
    for (auto const& tensor : manifest_.tensors) {
      auto& parts = parts_.at({array.name, tensor.name});
      std::sort(parts.begin(), parts.end(),
                [](Part const& a, Part const& b) { return a.slice->first < b.slice->first; });
      std::int64_t covered = 0;
      for (auto const& part : parts) {
        if (part.slice->dtype != type_of(array, tensor.name))
          wrong(array.name, tensor.name, "have a slice of another dtype");
        if (part.slice->first != covered) wrong(array.name, tensor.name, "have slices that overlap or leave a gap");
        covered = part.end();
      }
      if (covered != (has(array.name, tensor.name) ? tensor.numel : 0))
        wrong(array.name, tensor.name, "are incomplete: slices are missing");
    }
  }
}

FSDP_BODY DType ShardedReader::type_of(ArrayEntry const& array, std::string const& tensor) const {
  auto const own = manifest_.types.find(tensor);
  return array.name == parameters_array && own != manifest_.types.end() ? own->second : array.dtype;
}

FSDP_BODY void ShardedReader::wrong(std::string_view array, std::string_view tensor, std::string_view how) const {
  fail<ConfigError>("'{}': {} of tensor '{}' {}", folder_.string(), array, tensor, how);
}

FSDP_BODY RankFileReader& ShardedReader::reader(std::size_t file) {
  if (readers_[file] == nullptr) readers_[file] = std::make_unique<RankFileReader>(folder_, descriptions_[file]);
  return *readers_[file];
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint

#endif
