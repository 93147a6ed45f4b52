// SPDX-License-Identifier: Apache-2.0
// The files that `prepare` reads: pipes too, and none of a format that it would take for text.
#pragma once

#include <filesystem>
#include <string>

namespace transformer {

/// Whether `path` is "-", /dev/stdin or anything else that can be read once and in order only: a pipe, a terminal.
bool is_stream(std::filesystem::path const& path);

/// What messages call the file: its path, or "standard input".
std::string shown_name(std::filesystem::path const& path);

/// A copy of a stream on disk, without a name: it goes when the object does, or the process ends.
class StreamCopy {
 public:
  /// Reads the stream to its end.
  /// @param folder  where there is room for the copy
  /// @throws fsdp::ConfigError if the stream cannot be read, or the copy cannot be written
  StreamCopy(std::filesystem::path const& stream, std::filesystem::path const& folder);
  StreamCopy(StreamCopy const&) = delete;
  StreamCopy& operator=(StreamCopy const&) = delete;
  ~StreamCopy();

  /// Opens the copy, as often as needed.
  std::filesystem::path path() const;
  /// Whether its first line that is not blank is a JSON object.
  bool begins_with_json() const;

 private:
  int file_ = -1;
};

/// @param name  what messages call it
/// @throws fsdp::ConfigError if the file is compressed or in a format of tables, with the command that makes text of it
void expect_text(std::filesystem::path const& path, std::string const& name);

}  // namespace transformer
