// SPDX-License-Identifier: Apache-2.0
// The file of a run's log.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace transformer {

inline constexpr std::string_view log_file_name = "log.jsonl";

/// Appends lines to a file. A process that is killed while it writes leaves half a line at most, and the next line
/// begins on its own; training outlives a disk that is full.
class LogFile {
 public:
  LogFile() = default;  ///< writes nothing: every rank but the first
  /// @throws fsdp::ConfigError if the file cannot be opened for writing, or is no regular file: a link is not followed,
  /// and a pipe could make training wait for its reader
  explicit LogFile(std::filesystem::path const& file);
  LogFile(LogFile const&) = delete;
  LogFile& operator=(LogFile const&) = delete;
  ~LogFile();

  /// Writes the object and a line's end at once. The first failure is said on stderr; lines that cannot be written are
  /// missing.
  void write(std::string_view object) noexcept;

 private:
  bool append(std::string_view text) noexcept;

  std::string name_;
  int file_ = -1;
  bool torn_ = false;  ///< what stands last in the file is no whole line
  bool warned_ = false;
};

}  // namespace transformer
