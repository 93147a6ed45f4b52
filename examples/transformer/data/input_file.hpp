// SPDX-License-Identifier: Apache-2.0
// Input files of `prepare`: text files and pipes; formats that are no text are refused.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

namespace transformer {

/// Whether `path` is "-", /dev/stdin or anything else that can be read once and in order only: a pipe, a terminal.
bool is_stream(std::filesystem::path const& path);

/// The name of the file in messages: its path, or "standard input".
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

 private:
  int file_ = -1;
};

/// The forms in which a file has texts.
enum class TextForm : unsigned char {
  text,  ///< the file is one text
  lines  ///< each line is a JSON object, whose "text" is one document
};

/// The form that a file's name says, in letters of either case: .txt is one text, .jsonl and .ndjson have lines.
std::optional<TextForm> form_by_name(std::filesystem::path const& name);

/// The form of a file: that which its name says, else lines if it begins with a JSON object, else one text.
/// @param path  where the file is opened
/// @param name  the file's own, for its ending and for messages
/// @throws fsdp::ConfigError if the file is compressed, in UTF-16, a table, or other JSON, with the command that makes
/// text of it
TextForm form_of_file(std::filesystem::path const& path, std::string const& name);

}  // namespace transformer
