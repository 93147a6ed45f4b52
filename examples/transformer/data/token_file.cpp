// SPDX-License-Identifier: Apache-2.0
// A file of token ids.
#include "transformer/data/token_file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <string>
#include <system_error>

#include "fsdp/error.hpp"
#include "transformer/launch/program.hpp"

namespace transformer {
namespace {

namespace fs = std::filesystem;

std::string system_text(int error) { return std::generic_category().message(error); }

std::int64_t modified_ns_of(struct stat const& status) {
  return status.st_mtim.tv_sec * 1'000'000'000 + status.st_mtim.tv_nsec;
}

/// [Note: Headers of tokens]
/// llm.c's files begin with 256 int32 (dev/data/data_common.py): magic, version, number of tokens, zeros. A file
/// without a header cannot begin like this by chance: as uint16 ids both magics begin with one above GPT-2's last,
/// 50256.
struct HeaderKind {
  std::int32_t magic, version;
  std::size_t token_bytes;
};
constexpr HeaderKind header_kinds[] = {{20240520, 1, 2}, {20240801, 7, 4}};
constexpr std::size_t header_words = 256;

}  // namespace

MappedFile::MappedFile(fs::path const& path) {
  int const descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) fsdp::fail<fsdp::ConfigError>("'{}' cannot be opened: {}", path.string(), system_text(errno));
  struct stat status {};
  int error = 0;
  if (::fstat(descriptor, &status) != 0) error = errno;
  if (error == 0 && !S_ISREG(status.st_mode)) error = S_ISDIR(status.st_mode) ? EISDIR : EINVAL;
  modified_ns_ = modified_ns_of(status);
  if (error == 0 && status.st_size > 0) {
    void* const address =
        ::mmap(nullptr, static_cast<std::size_t>(status.st_size), PROT_READ, MAP_SHARED, descriptor, 0);
    if (address == MAP_FAILED) {
      error = errno;
    } else {
      data_ = static_cast<std::byte const*>(address);
      size_ = static_cast<std::size_t>(status.st_size);
    }
  }
  ::close(descriptor);
  if (error != 0) fsdp::fail<fsdp::ConfigError>("'{}' cannot be read: {}", path.string(), system_text(error));
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

TokenFile::TokenFile(fs::path const& path, std::size_t token_bytes) : path_(path), token_bytes_(token_bytes) {
  std::error_code error;
  if (!fs::exists(path, error))
    fsdp::fail<fsdp::ConfigError>(
        "data: '{}' is missing; write it with: {} prepare --dataset=NAME --data=FILE, or name another file by "
        "--train_data or --val_data",
        path.string(), program_name);
  file_ = MappedFile(path);
  if (file_.bytes().empty()) fsdp::fail<fsdp::ConfigError>("data: '{}' is empty", path.string());
  read_header();
  auto const bytes = tokens().size();
  if (bytes % token_bytes_ != 0)
    fsdp::fail<fsdp::ConfigError>(
        "data: '{}' has {} bytes, which is not a multiple of {}: it is truncated or not a token file", path.string(),
        bytes, token_bytes_);
  size_ = static_cast<std::int64_t>(bytes / token_bytes_);
}

void TokenFile::read_header() {
  std::array<std::int32_t, 3> words{};  // magic, version, number of tokens
  auto const bytes = file_.bytes();
  if (bytes.size() < sizeof words[0]) return;
  std::memcpy(words.data(), bytes.data(), std::min(sizeof words, bytes.size()));
  auto const* const kind = std::find_if(std::begin(header_kinds), std::end(header_kinds),
                                        [&](HeaderKind const& known) { return known.magic == words[0]; });
  if (kind == std::end(header_kinds)) return;
  header_bytes_ = header_words * sizeof words[0];
  if (bytes.size() < header_bytes_)
    fsdp::fail<fsdp::ConfigError>(
        "data: '{}' begins like llm.c's token files, whose header has {} bytes; the file has only {}", path_.string(),
        header_bytes_, bytes.size());
  if (words[1] != kind->version)
    fsdp::fail<fsdp::ConfigError>("data: '{}' has llm.c's header {} in version {}, expected version {}", path_.string(),
                                  kind->magic, words[1], kind->version);
  token_bytes_ = kind->token_bytes;
  auto const expected = static_cast<std::uint64_t>(std::max(words[2], 0)) * token_bytes_;
  if (words[2] <= 0 || tokens().size() != expected)
    fsdp::fail<fsdp::ConfigError>(
        "data: '{}': its header says {} tokens of {} bytes, but {} bytes follow: it is truncated or not a token file",
        path_.string(), words[2], token_bytes_, tokens().size());
}

bool TokenFile::is_unchanged() const {
  struct stat status {};
  return ::stat(path_.c_str(), &status) == 0 && static_cast<std::uint64_t>(status.st_size) == file_bytes() &&
         modified_ns_of(status) == modified_ns();
}

template <class Use>
decltype(auto) TokenFile::with_ids(std::int64_t first, std::int64_t last, Use&& use) const {
  auto const ids = [&](auto const* all) { return std::span(all + first, static_cast<std::size_t>(last - first)); };
  auto const* const bytes = tokens().data();  // aligned: the file begins on a page, and its header has 1,024 bytes
  if (token_bytes_ == 2) return use(ids(reinterpret_cast<std::uint16_t const*>(bytes)));
  return use(ids(reinterpret_cast<std::uint32_t const*>(bytes)));
}

std::int64_t TokenFile::at(std::int64_t index) const {
  return with_ids(index, index + 1, [](auto ids) { return std::int64_t{ids[0]}; });
}

std::int64_t TokenFile::largest(std::int64_t first, std::int64_t last) const {
  if (first >= last) return -1;
  return with_ids(first, last, [](auto ids) {
    auto most = ids[0];
    for (auto const id : ids) most = std::max(most, id);  // without a branch, so that it can be vectorized
    return std::int64_t{most};
  });
}

void TokenFile::check_ids(std::int64_t vocab_size, std::int64_t first, std::int64_t last) const {
  if (largest(first, last) < vocab_size) return;
  auto index = first;
  while (at(index) < vocab_size) ++index;
  fsdp::fail<fsdp::ConfigError>("data: '{}' has token {} at position {}, outside the vocabulary of {}", path_.string(),
                                at(index), index, vocab_size);
}

void TokenFile::read(std::int64_t start, std::int64_t vocab_size, std::span<std::int32_t> inputs,
                     std::span<std::int32_t> targets) const {
  auto const length = static_cast<std::int64_t>(inputs.size());
  FSDP_EXPECTS(start >= 0 && start < size_ - length,
               "data: '{}' has {} tokens, too few for a block of {} tokens and the next token from position {} on",
               path_.string(), size_, length, start);
  FSDP_EXPECTS(inputs.size() == targets.size(), "a sequence of {} inputs has {} targets", inputs.size(),
               targets.size());
  with_ids(start, start + length + 1, [&](auto ids) {
    for (std::size_t i = 0; i < ids.size(); ++i) {
      std::int64_t const id = ids[i];  // once: another program may be writing to the file
      if (id >= vocab_size)
        fsdp::fail<fsdp::Error>(
            "data: '{}' has token {} at position {}, outside the vocabulary of {}: the file has changed since it was "
            "checked; write it again, and resume the run",
            path_.string(), id, start + static_cast<std::int64_t>(i), vocab_size);
      if (i < inputs.size()) inputs[i] = static_cast<std::int32_t>(id);
      if (i > 0) targets[i - 1] = static_cast<std::int32_t>(id);
    }
  });
}

}  // namespace transformer
