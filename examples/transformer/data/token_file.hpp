// SPDX-License-Identifier: Apache-2.0
// A file of token ids.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <utility>

namespace transformer {

/// A read-only file in memory by mmap; an empty file has no bytes.
class MappedFile {
 public:
  MappedFile() = default;
  /// @throws fsdp::ConfigError if the file cannot be opened, is no regular file or cannot be mapped
  explicit MappedFile(std::filesystem::path const& path);
  MappedFile(MappedFile&& other) noexcept { swap(other); }
  MappedFile& operator=(MappedFile&& other) noexcept {
    MappedFile(std::move(other)).swap(*this);
    return *this;
  }
  ~MappedFile();

  std::span<std::byte const> bytes() const { return {data_, size_}; }
  /// Time of the last change, nanoseconds, when the file was opened.
  std::int64_t modified_ns() const { return modified_ns_; }
  void swap(MappedFile& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(modified_ns_, other.modified_ns_);
  }

 private:
  std::byte const* data_ = nullptr;
  std::size_t size_ = 0;
  std::int64_t modified_ns_ = 0;
};

/// A file of token ids: without a header, as nanoGPT writes them, or with that of llm.c (see [Note: Headers of
/// tokens]).
class TokenFile {
 public:
  /// @param token_bytes  2 or 4; of a file with a header, the header says
  /// @throws fsdp::ConfigError if the file is missing, empty, not a whole number of tokens, or not what its header says
  TokenFile(std::filesystem::path const& path, std::size_t token_bytes);

  std::int64_t size() const { return size_; }
  std::int64_t at(std::int64_t index) const;
  /// The largest of the tokens [first, last); -1 if there are none.
  std::int64_t largest(std::int64_t first, std::int64_t last) const;
  /// @throws fsdp::ConfigError if one of the tokens [first, last) is not below `vocab_size`; names token and position
  void check_ids(std::int64_t vocab_size, std::int64_t first, std::int64_t last) const;
  /// Reads a sequence; targets are the inputs one token later.
  /// @param start       token that the sequence begins with
  /// @param vocab_size  tokens at or above it are refused: the file may have changed since it was checked
  /// @param inputs,targets  (block size)
  /// @pre start + block size < size()
  /// @throws fsdp::Error naming file, position and token of the first that is not below `vocab_size`
  void read(std::int64_t start, std::int64_t vocab_size, std::span<std::int32_t> inputs,
            std::span<std::int32_t> targets) const;

  std::filesystem::path const& path() const { return path_; }
  std::size_t token_bytes() const { return token_bytes_; }
  /// The tokens as they are stored, without a header.
  std::span<std::byte const> tokens() const { return file_.bytes().subspan(header_bytes_); }
  /// Bytes of the file, its header included.
  std::uint64_t file_bytes() const { return file_.bytes().size(); }
  std::int64_t modified_ns() const { return file_.modified_ns(); }
  /// Whether there still is a file of this path, size and time of last change.
  bool is_unchanged() const;

 private:
  /// Calls `use` with the tokens [first, last) as the whole numbers that they are stored as.
  template <class Use>
  decltype(auto) with_ids(std::int64_t first, std::int64_t last, Use&& use) const;
  void read_header();

  std::filesystem::path path_;
  MappedFile file_;
  std::size_t header_bytes_ = 0;
  std::size_t token_bytes_;
  std::int64_t size_ = 0;
};

}  // namespace transformer
