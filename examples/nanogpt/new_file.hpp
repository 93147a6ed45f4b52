// SPDX-License-Identifier: Apache-2.0
// A file that is there whole or not at all.
#pragma once

#include <filesystem>
#include <fstream>
#include <string_view>

namespace nanogpt {

/// Written under a temporary name; has its own from commit() on. Without a commit nothing of it is left.
class NewFile {
 public:
  /// @throws fsdp::ConfigError if it cannot be opened
  explicit NewFile(std::filesystem::path const& path);
  NewFile(NewFile&& other) noexcept;
  NewFile& operator=(NewFile&&) = delete;
  ~NewFile();

  /// @throws fsdp::ConfigError if it cannot be written
  void write(std::string_view bytes);
  /// @throws fsdp::ConfigError if it cannot be written or renamed
  void commit();

 private:
  std::filesystem::path path_, temporary_;  ///< `temporary_` is empty once there is nothing to remove
  std::ofstream stream_;
};

}  // namespace nanogpt
