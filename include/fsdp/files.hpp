// SPDX-License-Identifier: Apache-2.0
// Files of checkpoints: a call returns when the data are on the disk, or throws with the reason.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "fsdp/detail/base/compiled.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint {

namespace detail {

inline std::string system_text(int error) { return std::generic_category().message(error); }

/// @throws ResourceError: `path` cannot be `what`, and why
[[noreturn]] inline void throw_file_error(std::filesystem::path const& path, std::string_view what, int error) {
  fail<ResourceError>("'{}' cannot be {}: {}", path.string(), what, system_text(error));
}

/// Calls a system call again for as long as a signal interrupts it.
template <class Call>
auto retried(Call&& call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

/// An open file or folder; closed by the destructor.
class Descriptor {
 public:
  Descriptor() = default;  ///< below 0
  /// Below 0, with errno, if it could not be opened. @param mode  of a file that is made
  Descriptor(std::filesystem::path const& path, int flags, ::mode_t mode = 0666)
      : value_(retried([&] { return ::open(path.c_str(), flags | O_CLOEXEC, mode); })) {}
  Descriptor(Descriptor const&) = delete;
  Descriptor& operator=(Descriptor const&) = delete;
  ~Descriptor() { close(); }

  operator int() const { return value_; }
  /// @return as ::close; 0 if it was closed before
  int close() { return value_ < 0 ? 0 : ::close(release()); }
  /// Gives the descriptor up: the caller closes it.
  int release() { return std::exchange(value_, -1); }

 private:
  int value_ = -1;
};

/// A file for writing that was not there before. Temporary names can be guessed: a link that somebody has put there
/// would lead to another file, and a pipe would have no reader. So the name is removed, and the file made anew.
/// @return below 0, with errno, if it cannot be made
Descriptor new_file(std::filesystem::path const& path, ::mode_t mode);

}  // namespace detail

/// A file that is written from its beginning to its end. What was not synchronised may be lost.
class OutputFile {
 public:
  /// Makes the file. A file, link or pipe of that name is removed first; it is neither followed nor emptied.
  /// @param mode  who may read and write it, less the process's umask
  /// @throws ResourceError
  explicit OutputFile(std::filesystem::path path, ::mode_t mode = 0666)
      : path_(std::move(path)), file_(detail::new_file(path_, mode)) {
    if (file_ < 0) detail::throw_file_error(path_, "created", errno);
  }

  /// @throws ResourceError
  void write(std::span<std::byte const> bytes) {
    while (!bytes.empty()) {
      auto const written = detail::retried([&] { return ::write(file_, bytes.data(), bytes.size()); });
      if (written < 0) detail::throw_file_error(path_, "written", errno);
      bytes = bytes.subspan(static_cast<std::size_t>(written));
      size_ += written;
    }
  }
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }  ///< appends text; throws ResourceError

  /// Waits until everything is on the disk, and closes the file.
  /// @throws ResourceError
  void finish() {
    if (detail::retried([&] { return ::fsync(file_); }) != 0) detail::throw_file_error(path_, "written", errno);
    if (file_.close() != 0) detail::throw_file_error(path_, "written", errno);
  }

  std::int64_t size() const { return size_; }                  ///< bytes written so far
  std::filesystem::path const& path() const { return path_; }  ///< the path that the constructor got

 private:
  std::filesystem::path path_;
  detail::Descriptor file_;
  std::int64_t size_ = 0;
};

/// A file that is read at any place. No mapping: a file that is cut short under way gives an error, not a signal.
class InputFile {
 public:
  /// @throws ConfigError if it cannot be opened or is no regular file
  explicit InputFile(std::filesystem::path path) : path_(std::move(path)), file_(path_, O_RDONLY | O_NONBLOCK) {
    if (file_ < 0) fail<ConfigError>("'{}' cannot be opened: {}", path_.string(), detail::system_text(errno));
    struct stat status {};
    int const error = ::fstat(file_, &status) != 0 ? errno : S_ISREG(status.st_mode) ? 0 : EINVAL;
    size_ = status.st_size;
    if (error != 0)
      fail<ConfigError>("'{}' cannot be read: {}", path_.string(),
                        S_ISDIR(status.st_mode) ? "it is a folder" : detail::system_text(error));
  }

  /// Reads out.size() bytes from byte `first` on.
  /// @throws ConfigError if the file ends before
  void read(std::int64_t first, std::span<std::byte> out) const {
    while (!out.empty()) {
      auto const got = detail::retried([&] { return ::pread(file_, out.data(), out.size(), first); });
      if (got < 0) fail<ConfigError>("'{}' cannot be read: {}", path_.string(), detail::system_text(errno));
      if (got == 0)
        fail<ConfigError>("'{}' is truncated: {} bytes from offset {} on are missing", path_.string(), out.size(),
                          first);
      out = out.subspan(static_cast<std::size_t>(got));
      first += got;
    }
  }

  std::int64_t size() const { return size_; }                  ///< bytes of the file when it was opened
  std::filesystem::path const& path() const { return path_; }  ///< the path that the constructor got

 private:
  std::filesystem::path path_;
  detail::Descriptor file_;
  std::int64_t size_ = 0;
};

/// The whole file. @param most  bytes that it may have
/// @throws ConfigError if it cannot be read or is longer
std::string read_text_file(std::filesystem::path const& path, std::int64_t most = 1 << 28);

/// Runs `act` on files that this run has written: an unreadable one is a failure of the disk, not a wrong setting.
/// @throws ResourceError instead of ConfigError
template <class Act>
auto reading_for_a_save(Act&& act) {
  try {
    return std::forward<Act>(act)();
  } catch (ConfigError const& error) {
    throw ResourceError(error.what());
  }
}

/// Waits until the folder's entries are on the disk: files made, renamed and removed in it.
/// @throws ResourceError
void sync_folder(std::filesystem::path const& folder);

/// The folder that holds it: "." where the path names none.
std::filesystem::path folder_of(std::filesystem::path const& path);

/// Gives a file or folder another name, on the disk once somebody synchronises its folder. @throws ResourceError
void rename(std::filesystem::path const& from, std::filesystem::path const& to);
/// Renames, and synchronises the folder. @throws ResourceError
void rename_durably(std::filesystem::path const& from, std::filesystem::path const& to);

/// Replaces a file: whoever reads it finds the old text or the new one.
/// @param temporary  has the text until it is whole; removed if that fails
/// @throws ResourceError
void write_beside(std::filesystem::path const& path, std::filesystem::path const& temporary, std::string_view text,
                  ::mode_t mode = 0666);
/// Replaces a file, also across a crash of the machine. @throws ResourceError
void replace_text_file(std::filesystem::path const& path, std::string_view text);

/// Makes a folder, unless it exists. @throws ResourceError
void make_folder(std::filesystem::path const& folder);

/// Makes a folder and those above it, on the disk too. @throws ResourceError
void make_folders(std::filesystem::path const& folder);

/// Removes a folder and all that is in it; one that is not there is no error. @throws ResourceError
void remove_folder(std::filesystem::path const& folder);

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint

#if FSDP_CHECKPOINT_BODIES

namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint {

FSDP_BODY detail::Descriptor detail::new_file(std::filesystem::path const& path, ::mode_t mode) {
  struct stat status {};
  if (::lstat(path.c_str(), &status) == 0 && ::unlink(path.c_str()) != 0) return Descriptor();
  return Descriptor(path, O_WRONLY | O_CREAT | O_EXCL, mode);
}

FSDP_BODY std::string read_text_file(std::filesystem::path const& path, std::int64_t most) {
  InputFile const file(path);
  if (file.size() > most) fail<ConfigError>("'{}' has {} bytes; expected at most {}", path.string(), file.size(), most);
  std::string text(static_cast<std::size_t>(file.size()), '\0');
  file.read(0, std::as_writable_bytes(std::span(text)));
  return text;
}

FSDP_BODY void sync_folder(std::filesystem::path const& folder) {
  detail::Descriptor const file(folder, O_RDONLY | O_DIRECTORY);
  if (file < 0) detail::throw_file_error(folder, "opened", errno);
  int const failed = detail::retried([&] { return ::fsync(file); });
  int const error = errno;
  // Some file systems cannot synchronise folders, and need not.
  if (failed != 0 && error != EINVAL && error != ENOTSUP) detail::throw_file_error(folder, "synchronised", error);
}

FSDP_BODY std::filesystem::path folder_of(std::filesystem::path const& path) {
  return path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
}

FSDP_BODY void rename(std::filesystem::path const& from, std::filesystem::path const& to) {
  if (std::rename(from.c_str(), to.c_str()) != 0) detail::throw_file_error(to, "renamed into place", errno);
}

FSDP_BODY void rename_durably(std::filesystem::path const& from, std::filesystem::path const& to) {
  checkpoint::rename(from, to);
  sync_folder(folder_of(to));
}

FSDP_BODY void write_beside(std::filesystem::path const& path, std::filesystem::path const& temporary,
                            std::string_view text, ::mode_t mode) {
  try {
    OutputFile file(temporary, mode);
    file.write(text);
    file.finish();
    checkpoint::rename(temporary, path);
  } catch (...) {
    std::error_code ignored;
    std::filesystem::remove(temporary, ignored);  // the disk may be full
    throw;
  }
}

FSDP_BODY void replace_text_file(std::filesystem::path const& path, std::string_view text) {
  write_beside(path, path.string() + ".tmp", text);
  sync_folder(folder_of(path));
}

FSDP_BODY void make_folder(std::filesystem::path const& folder) {
  std::error_code error;
  if (::mkdir(folder.c_str(), 0777) != 0 && errno != EEXIST) detail::throw_file_error(folder, "made", errno);
  if (!std::filesystem::is_directory(folder, error)) detail::throw_file_error(folder, "made", ENOTDIR);
}

FSDP_BODY void make_folders(std::filesystem::path const& folder) {
  std::error_code error;
  if (folder.empty() || std::filesystem::is_directory(folder, error)) return;
  if (folder.has_parent_path() && folder.parent_path() != folder) make_folders(folder.parent_path());
  make_folder(folder);
  sync_folder(folder_of(folder));
}

FSDP_BODY void remove_folder(std::filesystem::path const& folder) {
  std::error_code error;
  std::filesystem::remove_all(folder, error);
  if (error) detail::throw_file_error(folder, "removed", error.value());
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint

#endif
