// SPDX-License-Identifier: Apache-2.0
// A file that appears under its name only when it is complete.
#pragma once

#include <cstddef>
#include <cstdio>
#include <deque>
#include <filesystem>
#include <string_view>
#include <vector>

namespace transformer {

/// A path that is removed if a signal ends the process: see remove_on_signals().
class RemovedOnSignal {
 public:
  /// @param path  a file, or a folder, which is removed if it is empty
  explicit RemovedOnSignal(std::filesystem::path const& path);
  RemovedOnSignal(RemovedOnSignal const&) = delete;
  RemovedOnSignal& operator=(RemovedOnSignal const&) = delete;
  ~RemovedOnSignal() { keep(); }
  /// From now on a signal leaves it.
  void keep();

 private:
  std::size_t slot_ = none;
  static constexpr std::size_t none = static_cast<std::size_t>(-1);
};

/// From now on SIGINT, SIGTERM and SIGHUP remove what RemovedOnSignal names, and end the process as they would have.
void remove_on_signals();

/// While it lives, a signal of remove_on_signals() waits.
class SignalsWait {
 public:
  SignalsWait();
  SignalsWait(SignalsWait const&) = delete;
  SignalsWait& operator=(SignalsWait const&) = delete;
  ~SignalsWait();
};

/// Written under a temporary name; has its own from commit() on. Without a commit nothing of it is left. What has
/// either name before, a link or a pipe too, is replaced; it is not followed.
class NewFile {
 public:
  /// @throws fsdp::ConfigError if it cannot be made
  explicit NewFile(std::filesystem::path const& path);
  NewFile(NewFile const&) = delete;
  NewFile& operator=(NewFile const&) = delete;
  ~NewFile();

  /// @throws fsdp::ConfigError if it cannot be written
  void write(std::string_view bytes);
  /// Waits until what was written is on the disk. @throws fsdp::ConfigError if it cannot be written
  void finish();
  /// finish(), and gives the file its name. @throws fsdp::ConfigError if it cannot be written or renamed
  void commit();
  /// Commits files one after the other, and removes others that go with them. A signal of remove_on_signals() waits
  /// until all is done.
  /// @param marker  a file that exists meanwhile: if the process is killed, it stays
  /// @throws fsdp::ConfigError as commit()
  static void commit_all(std::deque<NewFile>& files, std::vector<std::filesystem::path> const& others,
                         std::filesystem::path const& marker);

 private:
  std::filesystem::path path_, temporary_;  ///< `temporary_` is empty once there is nothing to remove
  RemovedOnSignal removed_;
  std::FILE* file_ = nullptr;  ///< null from finish() on
};

}  // namespace transformer
