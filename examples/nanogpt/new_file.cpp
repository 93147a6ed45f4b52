// SPDX-License-Identifier: Apache-2.0
// A file that is there whole or not at all.
#include "new_file.hpp"

#include <cerrno>
#include <system_error>
#include <utility>

#include "fsdp/error.hpp"

namespace nanogpt {
namespace {

[[noreturn]] void cannot_write(std::filesystem::path const& path) {
  fsdp::fail<fsdp::ConfigError>("'{}' cannot be written: {}", path.string(), std::generic_category().message(errno));
}

}  // namespace

NewFile::NewFile(std::filesystem::path const& path)
    : path_(path), temporary_(std::filesystem::path(path) += ".tmp"), stream_(temporary_, std::ios::binary) {
  if (!stream_) cannot_write(temporary_);
}

NewFile::NewFile(NewFile&& other) noexcept
    : path_(std::move(other.path_)),
      temporary_(std::exchange(other.temporary_, {})),
      stream_(std::move(other.stream_)) {}

NewFile::~NewFile() {
  if (temporary_.empty()) return;
  stream_.close();
  std::error_code ignored;
  std::filesystem::remove(temporary_, ignored);
}

void NewFile::write(std::string_view bytes) {
  stream_.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  if (!stream_) cannot_write(temporary_);
}

void NewFile::commit() {
  stream_.close();
  if (!stream_) cannot_write(temporary_);
  std::error_code error;
  std::filesystem::rename(temporary_, path_, error);
  if (error)
    fsdp::fail<fsdp::ConfigError>("'{}' cannot be renamed to '{}': {}", temporary_.string(), path_.string(),
                                  error.message());
  temporary_.clear();
}

}  // namespace nanogpt
