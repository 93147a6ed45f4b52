// SPDX-License-Identifier: Apache-2.0
// File locks: one process at a time saves to a folder, or trains in it.
#pragma once

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "fsdp/checkpoint/files.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint {

namespace detail {

/// Names a process among all processes of all machines, in one line: its host, the host's start (boot_id), the
/// namespace of its number, the number, and the time at which it began.
struct ProcessName {
  std::string host, boot, numbers;
  long id = 0;
  std::string began;

  static ProcessName of_this() {
    ProcessName name;
    char host[256] = {};
    name.host = ::gethostname(host, sizeof host - 1) == 0 && host[0] != '\0' ? host : "unknown";
    std::ifstream("/proc/sys/kernel/random/boot_id") >> name.boot;
    std::error_code error;
    name.numbers = std::filesystem::read_symlink("/proc/self/ns/pid", error).string();
    if (name.boot.empty()) name.boot = "-";
    if (name.numbers.empty()) name.numbers = "-";
    name.id = ::getpid();
    name.began = beginning_of(name.id);
    return name;
  }
  /// @return nullopt if the text is none of text()
  static std::optional<ProcessName> parse(std::string const& text) {
    ProcessName name;
    std::istringstream words(text);
    if (!(words >> name.host >> name.boot >> name.numbers >> name.id >> name.began)) return std::nullopt;
    return name;
  }
  std::string text() const { return formatted("{} {} {} {} {}\n", host, boot, numbers, id, began); }

  /// Whether the process has certainly ended. Unknown for processes of other machines, and of other namespaces of this
  /// machine: false.
  bool has_ended() const {
    auto const here = of_this();
    if (host != here.host || boot == "-" || numbers == "-") return false;
    return boot != here.boot || (numbers == here.numbers && began != beginning_of(id));
  }

 private:
  /// Field 22 of /proc/ID/stat: clock ticks since the host began. "-": there is no such process, or it has ended.
  static std::string beginning_of(long process) {
    std::ifstream stream(formatted("/proc/{}/stat", process));
    std::string const text{std::istreambuf_iterator<char>(stream), {}};
    std::istringstream fields(text.substr(text.rfind(')') + 1));  // the name before it may have blanks
    std::string field;
    for (int number = 3; number <= 22; ++number)
      if (!(fields >> field) || (number == 3 && (field == "Z" || field == "X"))) return "-";
    return field;
  }
};

}  // namespace detail

/// A lock with one holder at a time among all processes: it is released when this object is destroyed, or its process
/// ends.
///
/// [Note: Locks without flock]
/// The lock is a file, made for its owner alone (mode 0600): who may open a file may also lock it. It is locked by
/// flock(), which some network file systems do not have. There a second file, PATH.held, is made with O_EXCL: it names
/// the process that holds the lock, and goes with it. A process that was killed leaves it behind. The next one removes
/// it if it sees that the other has ended: both run on one machine, or the machine has started anew since. Otherwise
/// its error says which process that was, and which file to remove.
class FileLock {
 public:
  /// Whether the file stays when the lock is free again.
  enum class AtEnd : unsigned char { stays, removed };

  /// @param path  a file, which is made if it is not there
  /// @param who   may hold it, and what to do then, for the message
  /// @throws ResourceError if another holds it, or the file cannot be made or is no regular file
  explicit FileLock(
      std::filesystem::path path,
      std::string_view who = "another save is under way in the folder, of this run or of another: wait for it",
      AtEnd at_end = AtEnd::stays)
      : path_(std::move(path)), at_end_(at_end) {
    while (!take(who)) {
    }
  }
  FileLock(FileLock const&) = delete;
  FileLock& operator=(FileLock const&) = delete;
  ~FileLock() {
    if (at_end_ == AtEnd::removed) ::unlink(path_.c_str());
    if (!held_.empty()) ::unlink(held_.c_str());
  }

 private:
  /// @return false if the holder before has removed the file meanwhile
  bool take(std::string_view who) {
    file_.emplace(path_, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK, 0600);
    if (*file_ < 0) detail::throw_file_error(path_, "opened", errno);
    struct stat status {};
    if (::fstat(*file_, &status) != 0) detail::throw_file_error(path_, "opened", errno);
    if (!S_ISREG(status.st_mode))
      fail<ResourceError>("'{}' is not a regular file; expected the path of a lock file", path_.string());
    if ((status.st_mode & 077) != 0) static_cast<void>(::fchmod(*file_, 0600));  // of a version before 0600
    if (detail::retried([&] { return ::flock(*file_, LOCK_EX | LOCK_NB); }) == 0) {
      struct stat now {};
      return ::lstat(path_.c_str(), &now) == 0 && now.st_ino == status.st_ino && now.st_dev == status.st_dev;
    }
    if (errno == EWOULDBLOCK) fail<ResourceError>("'{}' is locked: {}", path_.string(), who);
    take_without_flock(who);
    return true;
  }

  void take_without_flock(std::string_view who) {
    std::filesystem::path const held = path_.string() + ".held";
    for (bool again = false;; again = true) {
      detail::Descriptor file(held, O_WRONLY | O_CREAT | O_EXCL, 0600);
      if (file >= 0) {
        auto const text = detail::ProcessName::of_this().text();
        bool const written = detail::retried([&] { return ::write(file, text.data(), text.size()); }) ==
                             static_cast<::ssize_t>(text.size());
        int const error = errno;
        if (!written) ::unlink(held.c_str());
        if (!written) detail::throw_file_error(held, "written", error);
        held_ = held;
        return;
      }
      if (errno != EEXIST) detail::throw_file_error(held, "created", errno);
      auto const text = text_of(held);
      auto const holder = detail::ProcessName::parse(text);
      if (again || !holder || !holder->has_ended() || !remove_stale(held, text)) refuse(who, held, holder);
    }
  }
  /// Removes the file of a holder that has ended, unless another process has taken the lock meanwhile.
  /// @return false: it has
  static bool remove_stale(std::filesystem::path const& held, std::string const& text) {
    std::filesystem::path const aside = held.string() + formatted(".{}", ::getpid());
    if (::rename(held.c_str(), aside.c_str()) != 0) return errno == ENOENT;
    bool const is_stale = text_of(aside) == text;
    if (!is_stale) static_cast<void>(::link(aside.c_str(), held.c_str()) == 0);
    ::unlink(aside.c_str());
    return is_stale;
  }
  [[noreturn]] void refuse(std::string_view who, std::filesystem::path const& held,
                           std::optional<detail::ProcessName> const& holder) const {
    auto const process = holder ? formatted("process {} on {}", holder->id, holder->host) : std::string("a process");
    fail<ResourceError>("'{}' is locked: {}. {} holds the lock; if it has ended, remove the file '{}'", path_.string(),
                        who, process, held.string());
  }
  static std::string text_of(std::filesystem::path const& held) {
    try {
      return read_text_file(held, 4096);
    } catch (ConfigError const&) {  // it is gone, or nobody's
      return {};
    }
  }

  std::filesystem::path path_;
  AtEnd at_end_;
  std::optional<detail::Descriptor> file_;
  std::filesystem::path held_;  ///< the file that stands for the lock where there is no flock(); empty: none
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint
