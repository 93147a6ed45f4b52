// SPDX-License-Identifier: Apache-2.0
// Options of a save, and the folder of a run's checkpoints: a checkpoint appears complete or not at all, pointers name
// the one to continue from, and one process at a time saves or trains there.
#pragma once

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "fsdp/detail/checkpoint/manifest.hpp"
#include "fsdp/error.hpp"
#include "fsdp/files.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint {

namespace detail {

/// Names a process among all processes of all machines, in one line: its host, the host's start (boot_id), the
/// namespace of its number, the number, and the time at which it began.
struct ProcessName {
  std::string host, boot, numbers;
  long id = 0;
  std::string began;

  static ProcessName of_this();
  /// @return nullopt if the text is none of text()
  static std::optional<ProcessName> parse(std::string const& text);
  std::string text() const { return formatted("{} {} {} {} {}\n", host, boot, numbers, id, began); }

  /// Whether the process has certainly ended. Unknown for processes of other machines, and of other namespaces of this
  /// machine: false.
  bool has_ended() const;

 private:
  /// Field 22 of /proc/ID/stat: clock ticks since the host began. "-": there is no such process, or it has ended.
  static std::string beginning_of(long process);
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
  ~FileLock();

 private:
  /// @return false if the holder before has removed the file meanwhile
  bool take(std::string_view who);

  void take_without_flock(std::string_view who);
  /// Removes the file of a holder that has ended, unless another process has taken the lock meanwhile.
  /// @return false: it has
  static bool remove_stale(std::filesystem::path const& held, std::string const& text);
  [[noreturn]] void refuse(std::string_view who, std::filesystem::path const& held,
                           std::optional<detail::ProcessName> const& holder) const;
  static std::string text_of(std::filesystem::path const& held);

  std::filesystem::path path_;
  AtEnd at_end_;
  std::optional<detail::Descriptor> file_;
  std::filesystem::path held_;  ///< the file that stands for the lock where there is no flock(); empty: none
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

struct SaveOptions {
  std::int64_t step = -1;                       ///< for the name "step-N"; -1: the steps that the optimizer has taken
  std::vector<std::string> pointers{"latest"};  ///< files of the folder that name the checkpoint from now on
  int keep_last = 2;  ///< checkpoints that stay, this one too; besides those that a pointer names. 0: all
  /// Leaves out the parameters of frozen tensors. Whoever loads the checkpoint loads them first, from the same place as
  /// before the save.
  bool without_frozen = false;
};

namespace checkpoint {

/// [Note: What a crash leaves] Files are written, and synchronised, in a hidden folder; then the manifest; then that
/// folder gets its name; then the pointers do, one by one, each by renaming a file. Every step is on the disk before
/// the next begins. So a pointer names a whole checkpoint at every moment, and what a crash leaves behind is hidden:
/// the next save removes it.

/// A checkpoint's name: "step-12", or "step-12.2" if that was there already.
struct CheckpointName {
  std::int64_t step = 0, attempt = 1;

  static std::optional<CheckpointName> parse(std::string_view text);
  std::string text() const;
  friend auto operator<=>(CheckpointName const&, CheckpointName const&) = default;
};

/// Reads a pointer file. @return nullopt if there is none
/// @throws ConfigError if it names no checkpoint
std::optional<std::string> read_pointer(std::filesystem::path const& pointer);

/// The checkpoints of a folder, in the order in which they were saved, and leftover folders.
struct CheckpointList {
  std::vector<CheckpointName> checkpoints;
  std::vector<std::string> named;      ///< checkpoints that pointers name
  std::vector<std::string> leftovers;  ///< folders of saves that did not complete
  std::int64_t last_number = 0;        ///< the largest Manifest::save_number

  explicit CheckpointList(std::filesystem::path const& folder);

 private:
  /// A file that may be a pointer, without its line's end; else empty. Other threads and programs may write to the
  /// folder meanwhile: a file that is gone, or longer than a pointer, is none.
  /// @throws ResourceError if it cannot be read
  static std::string small_text(std::filesystem::directory_entry const& entry);
  /// @return 0 for a manifest that is damaged: its checkpoint counts as older than all others
  static std::int64_t save_number(std::filesystem::path const& manifest);
  /// ".step-N.partial" or ".step-N.old": folders that saves make, and nobody else.
  static bool is_leftover(std::string_view name);
};

/// @throws UsageError unless the options can be followed
void expect_possible(SaveOptions const& options);

/// Rank 0, first: makes the hidden folder, and removes what dead saves have left. @return its name
/// @pre the caller holds the folder's lock
/// @throws ResourceError
std::string begin_checkpoint(std::filesystem::path const& folder, std::int64_t step);

/// Rank 0, after a save that has failed on some rank: gives its space back. What cannot be removed now, the next save
/// removes.
/// @pre no rank writes any more, and the caller holds the folder's lock
void discard_checkpoint(std::filesystem::path const& folder, std::string const& partial);

/// Rank 0, when all ranks' files are there: makes it a checkpoint, and removes what is not kept.
/// @return its folder
/// @throws ConfigError if this rank does not see a rank's file; ResourceError
std::filesystem::path commit_checkpoint(std::filesystem::path const& folder, std::string const& partial,
                                        Manifest manifest, SaveOptions const& options);

/// Rank 0, last: removes checkpoints that are not kept. @param newest  stays in any case @throws ResourceError
void prune_checkpoints(std::filesystem::path const& folder, int keep_last, std::string const& newest);

}  // namespace checkpoint
}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE

#if FSDP_CHECKPOINT_BODIES

namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint {

FSDP_BODY std::optional<std::string> read_pointer(std::filesystem::path const& pointer) {
  std::error_code error;
  auto const found = std::filesystem::symlink_status(pointer, error);
  if (found.type() == std::filesystem::file_type::not_found && error != std::errc::not_a_directory) return std::nullopt;
  auto text = read_text_file(pointer, 4096);
  if (text.ends_with('\n')) text.pop_back();
  if (!CheckpointName::parse(text))
    fail<ConfigError>("'{}': expected the name of a checkpoint, step-N, got '{}'", pointer.string(),
                      text.substr(0, 80));
  return text;
}

FSDP_BODY void expect_possible(SaveOptions const& options) {
  FSDP_EXPECTS(options.step >= -1, "SaveOptions::step: expected 0 or more, got {}", options.step);
  FSDP_EXPECTS(options.keep_last >= 0, "SaveOptions::keep_last: expected 0 (all) or more, got {}", options.keep_last);
  for (auto const& name : options.pointers)
    FSDP_EXPECTS(!name.empty() && name.front() != '.' && name.find_first_of("/\n") == std::string::npos &&
                     !name.ends_with(".tmp") && !CheckpointName::parse(name),
                 "SaveOptions::pointers: '{}' cannot be the name of a pointer; expected a file name without slash that "
                 "does not begin with a dot, end in .tmp, or look like step-N",
                 name);
}

FSDP_BODY std::string begin_checkpoint(std::filesystem::path const& folder, std::int64_t step) {
  for (auto const& name : CheckpointList(folder).leftovers) remove_folder(folder / name);
  auto name = formatted(".step-{}.partial", step);
  make_folder(folder / name);  // on the disk with its final name, at the latest
  return name;
}

FSDP_BODY void discard_checkpoint(std::filesystem::path const& folder, std::string const& partial) {
  std::error_code ignored;
  std::filesystem::remove_all(folder / partial, ignored);
}

FSDP_BODY std::filesystem::path commit_checkpoint(std::filesystem::path const& folder, std::string const& partial,
                                                  Manifest manifest, SaveOptions const& options) {
  auto const hidden = folder / partial;
  std::error_code error;
  for (int rank = 0; rank < manifest.world_size; ++rank) {
    auto const name = rank_file_name(rank, manifest.world_size);
    auto const description = hidden / description_name(name);
    if (!std::filesystem::exists(description, error))
      fail<ConfigError>(
          "rank 0 does not see rank {}'s file '{}': it was not written, or the nodes do not share this folder; "
          "checkpoints need a shared folder",
          rank, description.string());
    manifest.files.emplace_back(name, checksum_of(read_text_file(description)));
  }
  manifest.save_number = CheckpointList(folder).last_number + 1;
  OutputFile file(hidden / manifest_name);
  file.write(to_json_text(manifest));
  file.finish();
  sync_folder(hidden);

  CheckpointName name{manifest.step, 1};
  while (std::filesystem::exists(folder / name.text(), error)) ++name.attempt;
  auto const final_folder = folder / name.text();
  rename_durably(hidden, final_folder);
  for (auto const& pointer : options.pointers) replace_text_file(folder / pointer, name.text() + "\n");
  return final_folder;
}

FSDP_BODY void prune_checkpoints(std::filesystem::path const& folder, int keep_last, std::string const& newest) {
  if (keep_last == 0) return;
  CheckpointList const list(folder);
  auto const size = static_cast<std::ptrdiff_t>(list.checkpoints.size());
  for (std::ptrdiff_t i = 0; i < size - keep_last; ++i) {
    auto const name = list.checkpoints[static_cast<std::size_t>(i)].text();
    if (name == newest || std::find(list.named.begin(), list.named.end(), name) != list.named.end()) continue;
    auto const hidden = folder / ("." + name + ".old");  // never half of one under its name
    rename_durably(folder / name, hidden);
    remove_folder(hidden);
  }
}

FSDP_BODY detail::ProcessName detail::ProcessName::of_this() {
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

FSDP_BODY std::optional<detail::ProcessName> detail::ProcessName::parse(std::string const& text) {
  ProcessName name;
  std::istringstream words(text);
  if (!(words >> name.host >> name.boot >> name.numbers >> name.id >> name.began)) return std::nullopt;
  return name;
}

FSDP_BODY bool detail::ProcessName::has_ended() const {
  auto const here = of_this();
  if (host != here.host || boot == "-" || numbers == "-") return false;
  return boot != here.boot || (numbers == here.numbers && began != beginning_of(id));
}

FSDP_BODY std::string detail::ProcessName::beginning_of(long process) {
  std::ifstream stream(formatted("/proc/{}/stat", process));
  std::string const text{std::istreambuf_iterator<char>(stream), {}};
  std::istringstream fields(text.substr(text.rfind(')') + 1));  // the name before it may have blanks
  std::string field;
  for (int number = 3; number <= 22; ++number)
    if (!(fields >> field) || (number == 3 && (field == "Z" || field == "X"))) return "-";
  return field;
}

FSDP_BODY FileLock::~FileLock() {
  if (at_end_ == AtEnd::removed) ::unlink(path_.c_str());
  if (!held_.empty()) ::unlink(held_.c_str());
}

FSDP_BODY bool FileLock::take(std::string_view who) {
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

FSDP_BODY void FileLock::take_without_flock(std::string_view who) {
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

FSDP_BODY bool FileLock::remove_stale(std::filesystem::path const& held, std::string const& text) {
  std::filesystem::path const aside = held.string() + formatted(".{}", ::getpid());
  if (::rename(held.c_str(), aside.c_str()) != 0) return errno == ENOENT;
  bool const is_stale = text_of(aside) == text;
  if (!is_stale) static_cast<void>(::link(aside.c_str(), held.c_str()) == 0);
  ::unlink(aside.c_str());
  return is_stale;
}

FSDP_BODY void FileLock::refuse(std::string_view who, std::filesystem::path const& held,
                                std::optional<detail::ProcessName> const& holder) const {
  auto const process = holder ? formatted("process {} on {}", holder->id, holder->host) : std::string("a process");
  fail<ResourceError>("'{}' is locked: {}. {} holds the lock; if it has ended, remove the file '{}'", path_.string(),
                      who, process, held.string());
}

FSDP_BODY std::string FileLock::text_of(std::filesystem::path const& held) {
  try {
    return read_text_file(held, 4096);
  } catch (ConfigError const&) {  // it is gone, or nobody's
    return {};
  }
}

FSDP_BODY std::optional<CheckpointName> CheckpointName::parse(std::string_view text) {
  constexpr std::string_view prefix = "step-";
  if (!text.starts_with(prefix)) return std::nullopt;
  auto const* at = text.data() + prefix.size();
  auto const* const end = text.data() + text.size();
  CheckpointName name;
  auto read = [&](std::int64_t& number) {
    auto const [stop, error] = std::from_chars(at, end, number);
    bool const digits = stop != at && *at != '-';
    at = stop;
    return error == std::errc{} && digits;
  };
  if (!read(name.step)) return std::nullopt;
  if (at != end && (*at++ != '.' || !read(name.attempt))) return std::nullopt;
  return at == end ? std::optional(name) : std::nullopt;
}

FSDP_BODY std::string CheckpointName::text() const {
  return attempt == 1 ? formatted("step-{}", step) : formatted("step-{}.{}", step, attempt);
}

FSDP_BODY CheckpointList::CheckpointList(std::filesystem::path const& folder) {
  std::error_code error;
  std::filesystem::directory_iterator const entries(folder, error);
  if (error) detail::throw_file_error(folder, "listed", error.value());
  for (auto const& entry : entries) {
    auto const name = entry.path().filename().string();
    if (auto const checkpoint = CheckpointName::parse(name);
        checkpoint && std::filesystem::exists(entry.path() / manifest_name, error))
      checkpoints.push_back(*checkpoint);
    if (is_leftover(name)) leftovers.push_back(name);
    if (auto text = small_text(entry); CheckpointName::parse(text)) named.push_back(std::move(text));
  }
  // The order is not by step: a run that continues from an earlier checkpoint saves lower steps later. It is not by
  // time alone: copies of a folder have other times. Checkpoints of earlier versions have no number, and the time
  // orders them.
  std::map<CheckpointName, std::pair<std::int64_t, std::filesystem::file_time_type>> saved;
  for (auto const& each : checkpoints) {
    auto const path = folder / each.text() / manifest_name;
    saved[each] = {save_number(path), std::filesystem::last_write_time(path, error)};
    last_number = std::max(last_number, saved[each].first);
  }
  std::sort(checkpoints.begin(), checkpoints.end(),
            [&](auto const& a, auto const& b) { return std::pair(saved[a], a) < std::pair(saved[b], b); });
}

FSDP_BODY std::string CheckpointList::small_text(std::filesystem::directory_entry const& entry) {
  auto const name = entry.path().filename().string();
  std::error_code error;
  if (name.front() == '.' || name.ends_with(".tmp") || !entry.is_regular_file(error)) return {};
  detail::Descriptor const file(entry.path(), O_RDONLY | O_NONBLOCK);
  if (file < 0 && errno == ENOENT) return {};
  if (file < 0) detail::throw_file_error(entry.path(), "opened", errno);
  std::array<char, 65> bytes{};
  auto const count = detail::retried([&] { return ::read(file, bytes.data(), bytes.size()); });
  if (count < 0) detail::throw_file_error(entry.path(), "read", errno);
  std::string text(bytes.data(), static_cast<std::size_t>(count));
  if (text.size() == bytes.size()) return {};
  if (text.ends_with('\n')) text.pop_back();
  return text;
}

FSDP_BODY std::int64_t CheckpointList::save_number(std::filesystem::path const& manifest) {
  try {
    return parse_manifest(read_text_file(manifest), "a manifest").save_number;
  } catch (Error const&) {
    return 0;
  }
}

FSDP_BODY bool CheckpointList::is_leftover(std::string_view name) {
  if (!name.starts_with('.')) return false;
  name.remove_prefix(1);
  for (std::string_view const ending : {".partial", ".old"})
    if (name.ends_with(ending)) return CheckpointName::parse(name.substr(0, name.size() - ending.size())).has_value();
  return false;
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint

#endif
