// SPDX-License-Identifier: Apache-2.0
// Saves a run while training continues: a thread writes a copy in host memory.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fsdp/awake_clock.hpp"
#include "fsdp/checkpoint/agreement.hpp"
#include "fsdp/checkpoint/file_lock.hpp"
#include "fsdp/checkpoint/host_copy.hpp"
#include "fsdp/checkpoint/save.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// State of this rank's part of a background save.
enum class SaveProgress {
  none,     ///< nothing was saved since the last wait()
  writing,  ///< the thread writes
  written,  ///< the thread has ended; on rank 0 the checkpoint is complete
  failed,   ///< the thread has ended with an error, which wait() throws on every rank
};

/// Saves in the background: training waits only for a copy to host memory. One save is under way at a time; the next
/// waits for it.
///
/// The checkpoint is there when all ranks have written their files, which rank 0's thread waits for: nobody need call
/// anything for that. Whether it is there, wait() says, and the next save: without them a failure is only printed. The
/// copy stays allocated, in the engine's account as MemoryTag::snapshot. After a failure the saver, the engine and the
/// optimizers may be used as before. The engine and the optimizers must outlive the saver.
template <class E>
class BackgroundSaver {
 public:
  /// @param patience  how long rank 0's thread waits for the others' files when it has written its own
  explicit BackgroundSaver(E& engine, std::chrono::milliseconds patience = std::chrono::minutes(10))
      : engine_(&engine), patience_(patience), copy_(engine) {}
  BackgroundSaver(BackgroundSaver&&) = delete;
  /// Waits for this rank's thread: on rank 0 until all ranks have written, one could not, or patience is at its end.
  /// Reports a failure that nobody has asked for.
  ~BackgroundSaver() {
    stop_waiting_ = std::uncaught_exceptions() > exceptions_;  // peers may never come
    if (thread_.joinable()) thread_.join();
    if (!failure_.empty()) std::fprintf(stderr, "fsdp: a checkpoint was not saved: %s\n", failure_.c_str());
  }

  /// Waits for the last save, copies the state, and returns; a thread writes it. See fsdp::save().
  /// @throws the last save's failure, on every rank, and then nothing is saved; else as fsdp::save() does for what
  /// precedes writing
  /// @note Collective: yes; blocks the calling thread until the state is in host memory.
  template <checkpoint::Checkpointable O>
  void save(O& optimizer, std::filesystem::path const& folder, nlohmann::ordered_json extra = nullptr,
            SaveOptions const& options = {}) {
    auto const turn = engine_->shards().enter("BackgroundSaver::save");
    engine_->shards().passes().expect_at_rest("a checkpoint is to be saved");
    wait();
    auto now = std::make_shared<checkpoint::Save<E>>(*engine_, checkpoint::RunState<E>(*engine_, optimizer), folder,
                                                     std::move(extra), options);
    try {
      checkpoint::agreed(engine_->world(), "memory for a checkpoint", [&] {
        copy_.reserve(now->bytes());
        return "";
      });
    } catch (...) {
      if (now->is_first()) checkpoint::discard_checkpoint(now->folder(), now->partial());
      throw;
    }
    std::int64_t offset = 0;
    for (std::size_t i = 0; i < now->slices().size(); ++i) {
      auto const bytes = now->slices()[i].bytes();
      now->copy(i, 0, bytes, copy_.data() + offset);
      offset += bytes;
    }
    engine_->device().synchronize(engine_->compute());
    failure_.clear();
    folder_.clear();
    stop_waiting_ = all_written_ = false;
    saving_ = {now->folder(), now->partial()};
    progress_ = SaveProgress::writing;
    thread_ = std::thread([this, now = std::move(now)] { run(*now); });
    under_way_ = true;
  }

  /// Waits until the last save is on the disk.
  /// @return its folder; empty if there was none since the last call
  /// @throws ResourceError or ConfigError on every rank if it could not be saved on one
  /// @note Collective: yes; blocks the calling thread.
  std::filesystem::path wait() {
    if (!under_way_) return {};
    under_way_ = false;
    try {
      auto folder = finish();
      progress_ = SaveProgress::none;
      return folder;
    } catch (...) {
      progress_ = SaveProgress::none;
      if (engine_->rank() == 0) discard();
      throw;
    }
  }

  /// State of this rank's part of the save, without waiting: other ranks may give another answer.
  /// @note Collective: no; any thread.
  SaveProgress progress() const noexcept { return progress_; }

 private:
  std::filesystem::path finish() {
    auto& world = engine_->world();
    if (world.rank() != 0) thread_.join();
    try {
      // Rank 0's thread waits for the others' files: it learns here that some will not come.
      checkpoint::agreed(world, "a checkpoint's files", [&] {
        if (world.rank() != 0 && !failure_.empty()) throw ResourceError(std::exchange(failure_, {}));
        return "";
      });
    } catch (...) {
      stop_waiting_ = true;
      if (thread_.joinable()) thread_.join();
      failure_.clear();
      throw;
    }
    all_written_ = true;
    if (thread_.joinable()) thread_.join();
    return checkpoint::agreed(world, "a checkpoint's end", [&] {
      if (!failure_.empty()) throw ResourceError(std::exchange(failure_, {}));
      return folder_;
    });
  }

  /// Removes files of a failed save, unless another save has begun.
  void discard() const {
    try {
      checkpoint::FileLock const lock(saving_.first / ".lock");
      checkpoint::discard_checkpoint(saving_.first, saving_.second);
    } catch (Error const&) {
    }
  }

  template <class S>
  void run(S const& now) noexcept {
    try {
      now.write(checkpoint::blocks_of(now.slices(), copy_.data()));
      if (now.is_first()) {
        wait_for_files(now);
        if (!stop_waiting_) folder_ = now.commit();
      }
      progress_ = SaveProgress::written;
    } catch (std::exception const& error) {
      try {
        failure_ = error.what();
        now.give_up(failure_);
      } catch (...) {
        if (failure_.empty()) failure_ = "no memory";
      }
      progress_ = SaveProgress::failed;
    }
  }

  /// Rank 0, until the others' files are there or it is asked to stop. After `patience`, commit() names the missing
  /// files.
  template <class S>
  void wait_for_files(S const& now) const {
    using Clock = AwakeClock;
    auto const complete = [&now] {
      Clock::LongCall const call;  // the file system may be slow
      return now.complete();
    };
    // A file system of several nodes may show files of other nodes a little later.
    auto const grace = std::min<std::chrono::milliseconds>(patience_ / 2, std::chrono::minutes(1));
    auto until = Clock::now() + patience_;
    bool told = false;
    while (!complete() && !stop_waiting_) {
      if (all_written_ && !std::exchange(told, true)) until = std::min(until, Clock::now() + grace);
      if (Clock::now() > until) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }

  E* engine_;
  std::chrono::milliseconds patience_;
  checkpoint::HostCopy<E> copy_;
  std::thread thread_;
  std::atomic<bool> stop_waiting_{false};
  std::atomic<bool> all_written_{false};  ///< all ranks' threads have written
  std::atomic<SaveProgress> progress_{SaveProgress::none};
  bool under_way_ = false;
  int exceptions_ = std::uncaught_exceptions();
  std::pair<std::filesystem::path, std::string> saving_;  ///< the last save's folder, and the hidden one in it
  // Owned by the thread until it is joined:
  std::string failure_, folder_;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
