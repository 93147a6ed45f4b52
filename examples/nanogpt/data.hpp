// SPDX-License-Identifier: Apache-2.0
// Token files on disk with what made them, and the sequences read from them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tokenizer/tokenizer.hpp"

namespace nanogpt {

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
  void swap(MappedFile& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
  }

 private:
  std::byte const* data_ = nullptr;
  std::size_t size_ = 0;
};

/// What meta.json says of a pair of token files.
struct Meta {
  std::int64_t vocab_size = 50304;              ///< GPT-2's 50257 rounded up to 128: for token files without meta.json
  std::size_t token_bytes = 2;                  ///< 2 (uint16) or 4 (uint32)
  std::filesystem::path path;                   ///< empty without meta.json
  std::shared_ptr<Tokenizer const> characters;  ///< null unless the tokens are characters
  std::vector<std::string> tokenizer_files;     ///< encoder.json and vocab.bpe, beside meta.json, of GPT-2's tokens
};

/// @throws fsdp::ConfigError if the file is there but says nonsense; a missing file gives the defaults
Meta read_meta(std::filesystem::path const& path);

/// What the tokens were made with; null if meta.json does not say.
/// @throws fsdp::ConfigError if its files cannot be read, or make another vocabulary than meta.json says
std::shared_ptr<Tokenizer const> open_tokenizer(Meta const& meta);

/// A file of token ids: without a header, as nanoGPT writes them, or with that of llm.c (see [Note: Headers of
/// tokens]).
class TokenFile {
 public:
  /// @param token_bytes  2 or 4; of a file with a header, the header says
  /// @throws fsdp::ConfigError if the file is missing, empty, not a whole number of tokens, or not what its header says
  TokenFile(std::filesystem::path const& path, std::size_t token_bytes);

  std::int64_t size() const { return size_; }
  std::int64_t at(std::int64_t index) const;
  /// @throws fsdp::ConfigError if one of the tokens [first, last) is not below `vocab_size`; names token and position
  void check_ids(std::int64_t vocab_size, std::int64_t first, std::int64_t last) const;
  std::filesystem::path const& path() const { return path_; }

 private:
  template <class Id>
  void check_ids_as(std::int64_t vocab_size, std::int64_t first, std::int64_t last) const;
  void read_header();
  std::span<std::byte const> tokens() const { return file_.bytes().subspan(header_bytes_); }

  std::filesystem::path path_;
  MappedFile file_;
  std::size_t header_bytes_ = 0;
  std::size_t token_bytes_;
  std::int64_t size_ = 0;
};

enum class Split : unsigned char { train, val };
constexpr std::string_view name(Split split) { return split == Split::train ? "train" : "val"; }

/// A data set: both splits and what meta.json says of them.
struct Dataset {
  Meta meta;
  TokenFile train, val;

  TokenFile const& split(Split which) const { return which == Split::train ? train : val; }
};

/// Opens data/`name`. @throws fsdp::ConfigError (see Meta and TokenFile)
Dataset open_dataset(std::string const& name);

/// What is drawn: each purpose has its own sequence of numbers.
enum class Draw : std::uint64_t { tokens = 0, train_loss = 1, val_loss = 2, window = 3 };

/// A number in [0, choices), uniform. Counter-based: it depends on the arguments alone, so that a run can be continued
/// anywhere and evaluations disturb nothing.
std::int64_t draw_offset(std::uint64_t seed, Draw draw, std::uint64_t batch, std::uint64_t sequence,
                         std::int64_t choices);

/// Reads a sequence; targets are the inputs one token later.
/// @param start  token that the sequence begins with
/// @param inputs,targets  (block size)
/// @pre start + block size < tokens.size()
void fill_sequence(TokenFile const& tokens, std::int64_t start, std::span<std::int32_t> inputs,
                   std::span<std::int32_t> targets);

}  // namespace nanogpt
