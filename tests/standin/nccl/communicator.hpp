// SPDX-License-Identifier: Apache-2.0
// One rank of a communicator.
#pragma once

#include <nccl.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "tests/standin/nccl/shared.hpp"

namespace standin::nccl {

/// A name for ThreadSanitizer of each of the latest collectives, equal for the ranks of one process.
struct Tags {
  std::array<char, 1024> bytes{};
  void* of(std::uint64_t sequence) { return &bytes[sequence % bytes.size()]; }
};

struct Window {
  std::byte* begin;
  std::size_t bytes;
  bool symmetric;
  int uses = 0;  ///< collectives that are enqueued or run
};

/// Functions that return a result have said why, if it is no success: see last_error().
/// [Note: Who sees what] Bookkeeping is hidden from ThreadSanitizer; callers hold an Unseen.
class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  Communicator(int place, int ranks, int ordinal, bool blocks)
      : rank(place), size(ranks), device(ordinal), blocking(blocks) {}
  Communicator(Communicator const&) = delete;
  Communicator& operator=(Communicator const&) = delete;
  ~Communicator();

  /// Waits for all ranks. @note Collective: yes
  ncclResult_t join(ncclUniqueId const& id);
  /// The identifier of this rank's part of a split, and its place in it; part.size is 0 with NCCL_SPLIT_NOCOLOR.
  struct Part {
    ncclUniqueId id;
    int rank, size;
  };
  /// @note Collective: yes
  ncclResult_t divide(int color, int key, Part& part);
  /// Every rank's mail. Reports ranks that make another call.
  /// @note Collective: yes
  ncclResult_t exchange(Mail mail, std::vector<Mail>& all);
  /// Waits for this rank's collectives, and for the ranks of this machine to do the same.
  ncclResult_t finalize();
  /// Nothing of this communicator runs afterwards; whoever waits in it goes on.
  void abort();

  /// Begins `action` on a thread of its own, which sets the state when it is done; until then it is ncclInProgress.
  void begin(std::function<ncclResult_t()> action);
  /// The state, for ncclCommGetAsyncError; looks for lost peers.
  ncclResult_t poll();
  bool is_in_progress() const { return state.load() == ncclInProgress || say_in_progress_.load(); }
  /// A communicator that does not block says ncclInProgress once after each collective.
  ncclResult_t enqueued();

  Window* window_of(void const* address);

  int const rank, size, device;
  bool const blocking;
  Shared shared;
  std::shared_ptr<Tags> tags;

  std::atomic<ncclResult_t> state{ncclSuccess};
  std::atomic<bool> aborted{false};
  std::atomic<bool> finalized{false};
  std::atomic<bool> calling{false};        ///< a thread is in a call that must be the only one
  std::atomic<std::uint64_t> sequence{0};  ///< of the latest collective that was enqueued
  std::atomic<std::uint64_t> finished{0};  ///< collectives that are done
  std::mutex stepping;                     ///< held while one of the collectives moves data
  std::uint64_t pieces = 0;                ///< of the collectives that are done; see Seat
  std::mutex windows_mutex;
  std::map<ncclWindow_t, Window> windows;

 private:
  ncclResult_t take_seat(ncclUniqueId const& id);
  ncclResult_t expect_own_gpus();
  /// Waits until `done` says so, or the communicator is aborted, or a peer is lost.
  ncclResult_t wait_until(std::string_view what, std::function<bool()> const& done);
  /// A peer that ended, or aborted; -1 while there is none, and where NCCL would not notice.
  int lost_peer();
  ncclResult_t fail_for(int peer);

  std::uint64_t mails_ = 0;
  std::atomic<bool> say_in_progress_{false};
  std::thread background_;
  std::vector<int> processes_;  // file descriptors by rank (pidfd_open); -1 for this process
};

/// Remembers the text for ncclGetLastError. @return result
ncclResult_t failed(ncclResult_t result, std::string text);
/// The latest such text, valid until the calling thread asks again.
char const* last_error();

}  // namespace standin::nccl
