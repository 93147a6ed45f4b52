// SPDX-License-Identifier: Apache-2.0
// Token files and vocabularies on disk, and the sequences read from them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

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

/// The characters of a text: ids are positions in `itos`, which is sorted by code point.
struct Vocabulary {
  std::vector<std::string> itos;                      ///< id to character, in UTF-8
  std::unordered_map<std::string, std::int64_t> stoi;  ///< character to id

  std::int64_t size() const { return static_cast<std::int64_t>(itos.size()); }
  /// @throws fsdp::ConfigError naming the first character that the vocabulary lacks, or the byte that is not UTF-8
  std::vector<std::int64_t> encode(std::string_view text) const;
  std::string decode(std::span<std::int64_t const> ids) const;
};

/// Unicode scalar values of a UTF-8 text.
/// @param origin what messages call the text
/// @throws fsdp::ConfigError with the offset of the first byte that is not UTF-8
std::vector<char32_t> decode_utf8(std::string_view text, std::string_view origin);
std::string encode_utf8(char32_t character);

/// What meta.json says of a pair of token files.
struct Meta {
  std::int64_t vocab_size = 50304;  ///< GPT-2's 50257 rounded up to 128: for token files without meta.json
  std::size_t token_bytes = 2;      ///< 2 (uint16) or 4 (uint32)
  Vocabulary vocabulary;            ///< empty without meta.json
  std::filesystem::path path;       ///< empty without meta.json
};

/// @throws fsdp::ConfigError if the file is there but says nonsense; a missing file gives the defaults
Meta read_meta(std::filesystem::path const& path);

/// A headless file of token ids.
class TokenFile {
 public:
  /// @throws fsdp::ConfigError if the file is missing, empty, or not a whole number of tokens
  TokenFile(std::filesystem::path const& path, std::size_t token_bytes);

  std::int64_t size() const { return size_; }
  std::int64_t at(std::int64_t index) const;
  /// @throws fsdp::ConfigError if one of the tokens [first, last) is not below `vocab_size`; names token and position
  void check_ids(std::int64_t vocab_size, std::int64_t first, std::int64_t last) const;
  std::filesystem::path const& path() const { return path_; }

 private:
  template <class Id>
  void check_ids_as(std::int64_t vocab_size, std::int64_t first, std::int64_t last) const;

  std::filesystem::path path_;
  MappedFile file_;
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
enum class Draw : std::uint64_t { tokens = 0, train_loss = 1, val_loss = 2 };

/// A number in [0, choices), uniform. Counter-based: it depends on the arguments alone, so that a run can be continued
/// anywhere and evaluations disturb nothing.
std::int64_t draw_offset(std::uint64_t seed, Draw draw, std::uint64_t batch, std::uint64_t sequence, std::int64_t choices);

/// Reads a sequence; targets are the inputs one token later.
/// @param start  token that the sequence begins with
/// @param inputs,targets  (block size)
/// @pre start + block size < tokens.size()
void fill_sequence(TokenFile const& tokens, std::int64_t start, std::span<std::int32_t> inputs,
                   std::span<std::int32_t> targets);

/// What `prepare` did.
struct PreparedText {
  std::int64_t characters = 0, vocab_size = 0, train_tokens = 0, val_tokens = 0;
};

/// Writes train.bin (the first 90 % of the characters), val.bin and meta.json into `folder`, each under a temporary
/// name first. uint16 ids, uint32 for more than 65,535 symbols.
/// @throws fsdp::ConfigError if the text is empty or not UTF-8, or the folder cannot be written
PreparedText prepare_text(std::filesystem::path const& text_file, std::filesystem::path const& folder);

}  // namespace nanogpt
