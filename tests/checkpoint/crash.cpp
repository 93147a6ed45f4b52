// SPDX-License-Identifier: Apache-2.0
// A save that ends at any file-system call, and a machine that forgets whatever was not synchronised, leave a whole
// checkpoint: the old one or the new one.
// needs: nlohmann_json xxHash
// skip-sanitizers
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fsdp/checkpoint.hpp"
#include "tests/catch.hpp"
#include "tests/checkpoint/support.hpp"
#include "tests/support/temporary_folder.hpp"

namespace disk {

namespace fs = std::filesystem;

enum class Kind { make_folder, create, truncate, write, synchronise, rename, remove };

/// A call that changes something, or puts it on the disk.
struct Call {
  Kind kind;
  std::string path{}, to{};  ///< to: rename's
  std::string bytes{};       ///< write's
  std::thread::id thread = std::this_thread::get_id();
};

/// Calls below `root` in this process, as they come.
struct Recorder {
  std::mutex mutex;
  std::string root;
  std::vector<Call> calls;
  std::map<int, std::string> files;                      ///< path by descriptor
  std::size_t kill_at = SIZE_MAX;                        ///< the process dies instead of this call
  std::size_t fail_from = SIZE_MAX, fail_to = SIZE_MAX;  ///< these fail with ENOSPC, or what else `error` says
  int error = ENOSPC;

  bool watches(std::string const& path) const { return !root.empty() && path.starts_with(root); }
  /// @return false, with errno, if the call is to fail
  bool note(Call call) {
    if (calls.size() == kill_at) ::kill(::getpid(), SIGKILL);
    calls.push_back(std::move(call));
    if (calls.size() <= fail_from || calls.size() > fail_to) return true;
    errno = error;
    return false;
  }
};
Recorder& recorder() {
  static auto* const one = new Recorder;
  return *one;
}

std::string path_of(int folder, char const* path) {
  if (path[0] == '/' || folder == AT_FDCWD) return path;
  auto const found = recorder().files.find(folder);
  return found == recorder().files.end() ? path : found->second + "/" + path;
}

int open_at(int folder, char const* path, int flags, mode_t mode) {
  auto& all = recorder();
  std::scoped_lock const lock(all.mutex);
  auto const name = path_of(folder, path);
  if (all.watches(name) && (flags & O_CREAT) != 0) {
    struct stat status {};
    bool const exists = ::stat(name.c_str(), &status) == 0;
    if (!exists && !all.note({Kind::create, name})) return -1;
    if (exists && (flags & O_TRUNC) != 0 && !all.note({Kind::truncate, name})) return -1;
  }
  auto const file = static_cast<int>(::syscall(SYS_openat, folder, path, flags, mode));
  if (file >= 0 && all.watches(name)) all.files[file] = name;
  return file;
}
int note_and(Call call, std::function<long()> const& act) {
  auto& all = recorder();
  std::scoped_lock const lock(all.mutex);
  if (all.watches(call.path) && !all.note(std::move(call))) return -1;
  return static_cast<int>(act());
}

}  // namespace disk

// In the place of the C library's, for the standard library too.
extern "C" {
int open(char const* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  auto const mode = (flags & O_CREAT) != 0 ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  return disk::open_at(AT_FDCWD, path, flags, mode);
}
int openat(int folder, char const* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  auto const mode = (flags & O_CREAT) != 0 ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  return disk::open_at(folder, path, flags, mode);
}
int close(int file) {
  {
    std::scoped_lock const lock(disk::recorder().mutex);
    disk::recorder().files.erase(file);
  }
  return static_cast<int>(::syscall(SYS_close, file));
}
ssize_t write(int file, void const* bytes, std::size_t count) {
  auto& all = disk::recorder();
  std::scoped_lock const lock(all.mutex);
  if (auto const found = all.files.find(file); found != all.files.end())
    if (!all.note({disk::Kind::write, found->second, {}, {static_cast<char const*>(bytes), count}})) return -1;
  return ::syscall(SYS_write, file, bytes, count);
}
int fsync(int file) {
  auto& all = disk::recorder();
  std::scoped_lock const lock(all.mutex);
  if (auto const found = all.files.find(file); found != all.files.end())
    if (!all.note({disk::Kind::synchronise, found->second})) return -1;
  return 0;  // after_crash() says what a disk would have; waiting for this one shows nothing
}
int rename(char const* from, char const* to) noexcept {
  return disk::note_and({disk::Kind::rename, from, to}, [&] { return ::syscall(SYS_rename, from, to); });
}
int mkdir(char const* path, mode_t mode) noexcept {
  return disk::note_and({disk::Kind::make_folder, path}, [&] { return ::syscall(SYS_mkdir, path, mode); });
}
int unlink(char const* path) noexcept {
  return disk::note_and({disk::Kind::remove, path}, [&] { return ::syscall(SYS_unlink, path); });
}
int rmdir(char const* path) noexcept {
  return disk::note_and({disk::Kind::remove, path}, [&] { return ::syscall(SYS_rmdir, path); });
}
int remove(char const* path) noexcept {
  return disk::note_and({disk::Kind::remove, path}, [&] {
    return ::syscall(SYS_unlink, path) == 0 || errno != EISDIR ? 0L : ::syscall(SYS_rmdir, path);
  });
}
int unlinkat(int folder, char const* path, int flags) noexcept {
  return disk::note_and({disk::Kind::remove, disk::path_of(folder, path)},
                        [&] { return ::syscall(SYS_unlinkat, folder, path, flags); });
}
}

namespace disk {

/// A tree of files as one that has been written to, or as what a crash leaves of it.
struct Tree {
  std::map<std::string, std::shared_ptr<std::string>> files;  ///< by path; a file keeps its bytes when it is renamed
  std::set<std::string> folders;

  void apply(Call const& call) {
    switch (call.kind) {
      case Kind::make_folder: folders.insert(call.path); return;
      case Kind::create: files[call.path] = std::make_shared<std::string>(); return;
      case Kind::truncate: files[call.path]->clear(); return;
      case Kind::write: *files[call.path] += call.bytes; return;
      case Kind::synchronise: return;
      case Kind::remove:
        files.erase(call.path);
        folders.erase(call.path);
        return;
      case Kind::rename: move(call.path, call.to); return;
    }
  }
  void move(std::string const& from, std::string const& to) {
    std::map<std::string, std::shared_ptr<std::string>> moved;
    for (auto at = files.begin(); at != files.end();) {
      bool const below = at->first == from || at->first.starts_with(from + "/");
      if (below) moved[to + at->first.substr(from.size())] = at->second;
      at = below ? files.erase(at) : std::next(at);
    }
    for (auto& [path, file] : moved) files[path] = file;
    std::set<std::string> moved_folders;
    for (auto at = folders.begin(); at != folders.end();) {
      bool const below = *at == from || at->starts_with(from + "/");
      if (below) moved_folders.insert(to + at->substr(from.size()));
      at = below ? folders.erase(at) : std::next(at);
    }
    folders.merge(moved_folders);
  }
};

std::string parent(std::string const& path) { return fs::path(path).parent_path().string(); }

/// A possible state of the disk after a crash behind the first `calls` calls: any part of the data that were not
/// synchronised is gone. A file's bytes are sure once it was synchronised after them; an entry (made, renamed, removed)
/// once its folder was.
/// @param keep  says of a call that is not sure whether it is there
template <class Keep>
Tree after_crash(Tree tree, std::vector<Call> const& all, std::size_t calls, Keep&& keep) {
  for (auto& [path, file] : tree.files) file = std::make_shared<std::string>(*file);
  auto const synchronised = [&](std::string const& path, std::size_t since) {
    for (auto i = since + 1; i < calls; ++i)
      if (all[i].kind == Kind::synchronise && all[i].path == path) return true;
    return false;
  };
  for (std::size_t i = 0; i < calls; ++i) {
    auto const& call = all[i];
    bool sure = true;
    if (call.kind == Kind::write || call.kind == Kind::truncate) {
      sure = synchronised(call.path, i);
      if (!tree.files.contains(call.path)) continue;  // its entry is gone
      if (!sure && call.kind == Kind::write && keep()) {
        *tree.files[call.path] += std::string(call.bytes.size(), '\0');  // its length, not its bytes
        continue;
      }
    } else if (call.kind == Kind::rename) {
      sure = synchronised(parent(call.to), i);
      if (!tree.files.contains(call.path) && !tree.folders.contains(call.path)) continue;
    } else {
      sure = call.kind == Kind::synchronise || synchronised(parent(call.path), i);
    }
    if (sure || keep()) tree.apply(call);
  }
  return tree;
}

Tree read_tree(fs::path const& root) {
  Tree tree;
  for (auto const& entry : fs::recursive_directory_iterator(root)) {
    if (entry.is_directory()) {
      tree.folders.insert(entry.path().string());
    } else {
      std::ifstream stream(entry.path(), std::ios::binary);
      tree.files[entry.path().string()] =
          std::make_shared<std::string>(std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>());
    }
  }
  return tree;
}
void write_tree(Tree const& tree, std::string const& from, fs::path const& to) {
  fs::remove_all(to);
  fs::create_directories(to);
  for (auto const& folder : tree.folders) fs::create_directories(to.string() + folder.substr(from.size()));
  for (auto const& [path, bytes] : tree.files) {
    fs::path const place = to.string() + path.substr(from.size());
    std::error_code error;
    if (!fs::is_directory(place.parent_path(), error)) continue;  // the folder's own entry is gone
    std::ofstream(place, std::ios::binary) << *bytes;
  }
}

}  // namespace disk

namespace {

namespace fs = std::filesystem;
using namespace fsdp::testing;

Trial const two_ranks{2, fsdp::FullShard{}, tiny()};

/// Goes on from what is there, if anything is, and saves one step more. @return the state before and after
std::pair<State, State> step_and_save(fs::path const& folder, bool background) {
  std::pair<State, State> states;
  run<fsdp::Fp32>(two_ranks, make_adamw, [&](auto& engine, auto& network, auto& adamw) {
    fsdp::load_latest(engine, adamw, folder);
    auto before = state_of(engine, adamw);
    train(network, adamw, before.steps, before.steps + 1);
    auto after = state_of(engine, adamw);
    fsdp::SaveOptions const options{.keep_last = 1};  // which removes the one before
    if (background) {
      fsdp::BackgroundSaver saver(engine);
      saver.save(adamw, folder, {{"step", after.steps}}, options);
      saver.wait();
    } else {
      fsdp::save(engine, adamw, folder, {{"step", after.steps}}, options);
    }
    if (engine.rank() == 0) states = {std::move(before), std::move(after)};
  });
  return states;
}
State load_state(fs::path const& folder) {
  State state;
  run<fsdp::Fp32>({1, fsdp::NoShard{}, tiny()}, make_adamw, [&](auto& engine, auto&, auto& adamw) {
    auto const loaded = fsdp::load_latest(engine, adamw, folder);
    REQUIRE(loaded);
    REQUIRE(loaded->extra["step"] == adamw.steps());
    state = state_of(engine, adamw);
  });
  return state;
}

}  // namespace

TEST_CASE("killed at every call of a save: the old checkpoint or the new one, and saving goes on") {
  for (bool const background : {false, true}) {
    TemporaryFolder const folder;
    auto const place = folder.path / "run";
    step_and_save(place, false);
    auto const before = load_state(place);
    std::size_t calls = 0, old_ones = 0, new_ones = 0;
    for (bool ended = false; !ended; ++calls) {
      auto const copy = folder.path / "copy";
      fs::remove_all(copy);
      fs::copy(place, copy, fs::copy_options::recursive);
      auto const child = ::fork();
      REQUIRE(child >= 0);
      if (child == 0) {
        disk::recorder().root = copy.string();
        disk::recorder().kill_at = calls;
        step_and_save(copy, background);
        std::_Exit(0);
      }
      int status = 0;
      ::waitpid(child, &status, 0);
      ended = WIFEXITED(status);
      REQUIRE((ended ? WEXITSTATUS(status) == 0 : WTERMSIG(status) == SIGKILL));
      auto const state = load_state(copy);
      INFO("killed at call " << calls);
      CHECK((state == before || state.steps == 2));
      ++(state == before ? old_ones : new_ones);
      step_and_save(copy, background);
      CHECK(load_state(copy).steps == state.steps + 1);
      for (auto const& entry : fs::directory_iterator(copy))
        CHECK_FALSE(entry.path().filename().string().starts_with(".step"));
    }
    CHECK(old_ones > 20);
    CHECK(new_ones > 1);
  }
}

TEST_CASE("a crash that drops what was not synchronised, in any order: the old checkpoint or the new one") {
  TemporaryFolder const folder;
  auto const place = folder.path / "run";
  step_and_save(place, false);
  auto const old_tree = disk::read_tree(place);
  auto& recorder = disk::recorder();
  recorder.root = place.string();
  auto const [before, after] = step_and_save(place, false);
  recorder.root.clear();
  auto const calls = std::exchange(recorder.calls, {});
  REQUIRE(calls.size() > 30);
  // Rank 0 believes in what has a description: whoever could still fail behind that would take its file back.
  auto const described = std::find_if(calls.begin(), calls.end(), [](disk::Call const& call) {
    return call.kind == disk::Kind::rename && call.to.ends_with("rank-00001-of-00002.safetensors.json");
  });
  REQUIRE(described != calls.end());
  CHECK(std::none_of(std::next(described), calls.end(),
                     [&](disk::Call const& call) { return call.thread == described->thread; }));
  std::mt19937_64 random(11);
  std::size_t old_ones = 0, new_ones = 0;
  for (std::size_t crash = 0; crash <= calls.size(); ++crash) {
    for (int variant = 0; variant < 12; ++variant) {
      auto const keep = [&] { return variant == 0 ? false : variant == 1 ? true : random() % 2 == 0; };
      auto const tree = disk::after_crash(old_tree, calls, crash, keep);
      disk::write_tree(tree, place.string(), folder.path / "after");
      INFO("crash behind call " << crash << ", variant " << variant);
      auto const state = load_state(folder.path / "after");
      CHECK((state == before || state == after));
      ++(state == before ? old_ones : new_ones);
    }
  }
  CHECK(old_ones > 100);
  CHECK(new_ones > 10);
}

TEST_CASE("a rank that can write neither its file nor why: nobody waits for it for ever") {
  TemporaryFolder const folder;
  auto const place = folder.path / "run";
  step_and_save(place, false);
  auto const before = load_state(place);
  auto& recorder = disk::recorder();
  for (bool const asks : {false, true}) {
    recorder.calls.clear();
    recorder.error = EROFS;
    recorder.fail_from = 0, recorder.fail_to = SIZE_MAX;
    std::atomic<int> refused{0};
    run<fsdp::Fp32>(two_ranks, make_adamw, [&](auto& engine, auto& network, auto& adamw) {
      fsdp::load_latest(engine, adamw, place);
      train(network, adamw, 1, 2);
      engine.mean_over_ranks({0.0});  // ranks are threads: one writes what both read
      if (engine.rank() == 0) recorder.root = (place / ".step-2.partial" / "rank-00001").string();
      engine.mean_over_ranks({0.0});
      fsdp::BackgroundSaver saver(engine, std::chrono::milliseconds(asks ? 600'000 : 50));
      saver.save(adamw, place);
      if (!asks) return;
      try {
        saver.wait();
      } catch (fsdp::ResourceError const&) {
        ++refused;
      }
    });
    recorder.root.clear();
    CHECK(refused == (asks ? 2 : 0));
    CHECK(load_state(place) == before);
  }
}

TEST_CASE("after a save that has failed on one rank the saver says so and saves again") {
  TemporaryFolder const folder;
  auto const place = folder.path / "run";
  step_and_save(place, false);
  auto& recorder = disk::recorder();
  recorder.calls.clear();
  recorder.error = ENOSPC;
  recorder.fail_from = 0, recorder.fail_to = SIZE_MAX;
  std::atomic<int> refused{0}, told{0}, saved{0};
  run<fsdp::Fp32>(two_ranks, make_adamw, [&](auto& engine, auto& network, auto& adamw) {
    fsdp::load_latest(engine, adamw, place);
    train(network, adamw, 1, 2);
    auto const watch = [&](std::string const& root) {
      engine.mean_over_ranks({0.0});
      if (engine.rank() == 0) recorder.root = root;
      engine.mean_over_ranks({0.0});
    };
    fsdp::BackgroundSaver saver(engine);
    if (saver.progress() == fsdp::SaveProgress::none) ++told;
    for (int attempt = 0; attempt < 2; ++attempt) {
      watch((place / ".step-2.partial" / "rank-00001").string());
      saver.save(adamw, place);
      while (saver.progress() == fsdp::SaveProgress::writing) {
        if (engine.rank() == 0) break;  // its thread waits for rank 1's file, which can say nothing
        std::this_thread::yield();
      }
      if (engine.rank() == 1 && saver.progress() == fsdp::SaveProgress::failed) ++told;
      try {
        saver.wait();
      } catch (fsdp::ResourceError const&) {
        ++refused;
      }
      if (saver.progress() == fsdp::SaveProgress::none) ++told;
    }
    watch("");
    saver.save(adamw, place, {{"step", 2}});
    while (saver.progress() == fsdp::SaveProgress::writing) std::this_thread::yield();
    if (saver.progress() == fsdp::SaveProgress::written) ++told;
    if (saver.wait().filename() == "step-2") ++saved;
  });
  CHECK(refused == 4);
  CHECK(told == 2 + 2 + 4 + 2);
  CHECK(saved == 2);
  CHECK(load_state(place).steps == 2);
}

TEST_CASE("a disk that is full, read-only or broken from some call on: every rank's error, and the old checkpoint") {
  TemporaryFolder const folder;
  auto const place = folder.path / "run";
  step_and_save(place, false);
  auto const before = load_state(place);
  auto& recorder = disk::recorder();
  for (bool const background : {false, true}) {
    for (bool const for_good : {false, true}) {
      std::size_t failures = 0;
      for (std::size_t call = 0;; ++call) {
        auto const copy = folder.path / "copy";
        fs::remove_all(copy);
        fs::copy(place, copy, fs::copy_options::recursive);
        recorder.calls.clear();
        recorder.error = call % 3 == 0 ? ENOSPC : call % 3 == 1 ? EROFS : EIO;
        recorder.fail_from = call, recorder.fail_to = for_good ? SIZE_MAX : call + 1;
        recorder.root = copy.string();
        std::atomic<int> refused{0};
        run<fsdp::Fp32>(two_ranks, make_adamw, [&](auto& engine, auto& network, auto& adamw) {
          fsdp::load_latest(engine, adamw, copy);
          train(network, adamw, 1, 2);
          try {
            if (background) {
              fsdp::BackgroundSaver saver(engine);
              saver.save(adamw, copy, {{"step", 2}}, {.keep_last = 1});
              saver.wait();
            } else {
              fsdp::save(engine, adamw, copy, {{"step", 2}}, {.keep_last = 1});
            }
          } catch (fsdp::ResourceError const& error) {
            if (std::string(error.what()).find(copy.string()) != std::string::npos) ++refused;
          }
        });
        recorder.root.clear();
        recorder.files.clear();
        INFO("failure of call " << call << (for_good ? " and all after it" : ""));
        CHECK((refused == 0 || refused == 2));
        auto const state = load_state(copy);
        CHECK((state == before || state.steps == 2));
        if (refused == 0) CHECK(state.steps == 2);
        if (refused == 2) ++failures;
        if (!for_good)  // what was written of it is gone: the disk may be full
          for (auto const& entry : fs::directory_iterator(copy)) CHECK(entry.path().extension() != ".partial");
        if (recorder.calls.size() <= call) break;  // there was no such call
        step_and_save(copy, false);
        CHECK(load_state(copy).steps == state.steps + 1);
      }
      CHECK(failures > 20);
    }
  }
  recorder.calls.clear();
  recorder.fail_from = recorder.fail_to = SIZE_MAX;
}
