// SPDX-License-Identifier: Apache-2.0
// Files that are written where somebody has put a link or a pipe, and locks: whom they keep out, also without flock().
// skip-tsan
// needs: nlohmann_json xxHash
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <utility>

#include "fsdp/detail/checkpoint/folder.hpp"
#include "fsdp/error.hpp"
#include "fsdp/files.hpp"
#include "tests/catch.hpp"
#include "tests/support/messages.hpp"
#include "tests/support/temporary_folder.hpp"

namespace {

namespace fs = std::filesystem;
using fsdp::ResourceError;
using fsdp::checkpoint::FileLock;
using fsdp::testing::has;
using fsdp::testing::TemporaryFolder;
using fsdp::testing::what;

std::string contents(fs::path const& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}
::mode_t mode_of(fs::path const& path) {
  struct stat status {};
  REQUIRE(::lstat(path.c_str(), &status) == 0);
  return status.st_mode & 07777;
}

std::atomic<int> flock_error{0};  ///< not 0: flock() fails with it, as where the file system has none
std::string removed_meanwhile;    ///< a file that its holder removes between another one's open() and flock()

/// Runs `act` in a child process, which then ends without a destructor, as one that is killed.
template <class Act>
void in_process_that_ends(Act&& act) {
  auto const child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    act();
    std::_Exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  REQUIRE(status == 0);
}

}  // namespace

// In the place of the C library's.
extern "C" int flock(int file, int operation) noexcept {
  if (!removed_meanwhile.empty()) ::unlink(std::exchange(removed_meanwhile, {}).c_str());
  if (int const error = flock_error.load(); error != 0) {
    errno = error;
    return -1;
  }
  return static_cast<int>(::syscall(SYS_flock, file, operation));
}

TEST_CASE("a temporary name that is taken by a link, a pipe or a second name of a file harms nobody") {
  TemporaryFolder const folder;
  auto const victim = folder.file("victim", "precious"), path = folder.path / "latest";
  fs::path const temporary = path.string() + ".tmp";
  auto const writes = [&] {
    fsdp::checkpoint::replace_text_file(path, "step-1\n");
    CHECK(contents(path) == "step-1\n");
    CHECK(fs::is_regular_file(fs::symlink_status(path)));
    CHECK(contents(victim) == "precious");
    CHECK_FALSE(fs::exists(fs::symlink_status(temporary)));
    fs::remove(path);
  };
  fs::create_symlink(victim, temporary);
  writes();
  fs::create_symlink(folder.path / "nowhere", temporary);
  writes();
  CHECK_FALSE(fs::exists(folder.path / "nowhere"));
  fs::create_hard_link(victim, temporary);
  writes();
  REQUIRE(::mkfifo(temporary.c_str(), 0600) == 0);
  writes();
  fs::create_symlink(victim, path);  // the name itself is replaced too
  writes();
  fs::create_directory(temporary);
  CHECK(has(what([&] { fsdp::checkpoint::replace_text_file(path, "x"); }),
            "latest.tmp' cannot be created: Is a directory"));
}

TEST_CASE("a lock keeps a second holder out, and is its owner's alone") {
  TemporaryFolder const folder;
  auto const path = folder.path / ".lock";
  {
    FileLock const first(path);
    CHECK(mode_of(path) == 0600);
    CHECK(
        has(what<ResourceError>([&] { FileLock const second(path); }), ".lock' is locked: another save is under way"));
  }
  CHECK(fs::exists(path));
  ::chmod(path.c_str(), 0644);  // as versions before made it
  { FileLock const again(path); }
  CHECK(mode_of(path) == 0600);
  fs::remove(path);
  auto const victim = folder.file("victim", "");
  fs::create_symlink(victim, path);
  CHECK(has(what<ResourceError>([&] { FileLock const lock(path); }), ".lock' cannot be opened"));
  fs::remove(path);
  REQUIRE(::mkfifo(path.c_str(), 0600) == 0);
  CHECK(has(what<ResourceError>([&] { FileLock const lock(path); }), ".lock' is not a regular file"));
}

TEST_CASE("a lock that is removed with its holder is one lock all the same") {
  TemporaryFolder const folder;
  auto const path = folder.path / ".lock";
  auto const lock = [&](std::optional<FileLock>& into) { into.emplace(path, "wait", FileLock::AtEnd::removed); };
  std::optional<FileLock> first, second;
  lock(first);
  CHECK(has(what<ResourceError>([&] { lock(second); }), ".lock' is locked: wait"));
  first.reset();
  CHECK_FALSE(fs::exists(path));
  lock(second);
  // Two that have opened it before its holder removed it must not both have it: the lock is of what has the name.
  second.reset();
  folder.file(".lock", "");
  removed_meanwhile = path.string();
  lock(first);
  CHECK(removed_meanwhile.empty());
  CHECK(fs::exists(path));
  CHECK(has(what<ResourceError>([&] { lock(second); }), ".lock' is locked: wait"));
}

TEST_CASE("without flock() a file that names the holder is the lock, and a holder that has ended has none") {
  TemporaryFolder const folder;
  auto const path = folder.path / ".train.lock";
  fs::path const held = path.string() + ".held";
  for (int const error : {ENOSYS, EOPNOTSUPP, ENOLCK}) {
    flock_error = error;
    {
      FileLock const first(path);
      CHECK(mode_of(held) == 0600);
      auto const refused = what<ResourceError>([&] { FileLock const second(path, "another run is training"); });
      CHECK(has(refused,
                ".train.lock' is locked: another run is training. process " + std::to_string(::getpid()) + " on "));
      CHECK(has(refused, "if it has ended, remove the file '" + held.string() + "'"));
    }
    CHECK_FALSE(fs::exists(held));
    // A process that was killed.
    in_process_that_ends([&] { static_cast<void>(new FileLock(path)); });
    CHECK(fs::exists(held));
    { FileLock const next(path); }
    CHECK_FALSE(fs::exists(held));
  }
  // A holder of whom nobody knows here: another machine's, and one that has just made the file.
  std::string text;
  {
    FileLock const own(path);
    text = contents(held);
  }
  for (std::string const& other : {"elsewhere" + text.substr(text.find(' ')), std::string()}) {
    folder.file(".train.lock.held", other);
    CHECK(has(what<ResourceError>([&] { FileLock const lock(path); }),
              other.empty() ? "a process holds" : " on elsewhere holds"));
    CHECK(contents(held) == other);
  }
  // A name of the same machine before it restarted.
  auto const boot = text.find(' ') + 1;
  folder.file(".train.lock.held", text.substr(0, boot) + "earlier" + text.substr(text.find(' ', boot)));
  { FileLock const lock(path); }
  CHECK_FALSE(fs::exists(held));
  flock_error = 0;
}
