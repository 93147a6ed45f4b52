// SPDX-License-Identifier: Apache-2.0
// Short messages between nodes about departures, failures and waiting ranks. Threads that wait read
// them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <mutex>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/detail/mpi/calls.hpp"
#include "fsdp/detail/mpi/header.hpp"
#include "fsdp/detail/mpi/wait.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::mpi::detail {

/// A message to ranks on other nodes about a communicator or all that were split from one world.
struct Notice {
  enum class Kind : std::uint8_t { left, failed, waits };

  Kind kind{};
  bool flag = false;              ///< left: by an exception; failed: ranks disagree
  std::uint64_t subject = 0;      ///< of departures and some failures: the communicator; else the world
  std::uint64_t collectives = 0;  ///< left: how many were enqueued; failed: in which, 0 in all
  std::uint64_t calls = 0;        ///< left: how many of the control plane were made
  CallRecord record;              ///< waits: the call
  char text[FailureNote::most_text] = {};
};
static_assert(std::is_trivially_copyable_v<Notice>);

/// Sends notices without waiting, and keeps those that have come. One per process, for any thread.
///
/// Nobody waits for a notice, and only threads that have waited for a while look for some: a run in which nothing fails
/// exchanges a few when communicators end. Notices are small enough for MPI to deliver without a receiver.
class NodeMail {
 public:
  struct Received {
    int from;  ///< in the world
    Notice notice;
  };

  /// @note Collective: yes, over MPI_COMM_WORLD.
  NodeMail() {
    check(MPI_Comm_dup(MPI_COMM_WORLD, &comm_), "MPI_Comm_dup");
    check(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  }
  NodeMail(NodeMail const&) = delete;
  NodeMail& operator=(NodeMail const&) = delete;

  /// Keeps notices about `subject` from now on. Before any rank can write one: before its last collective step.
  void open(std::uint64_t subject) {
    std::scoped_lock const lock(mutex_);
    subjects_[subject];
  }
  void close(std::uint64_t subject) noexcept {
    std::scoped_lock const lock(mutex_);
    subjects_.erase(subject);
  }

  /// Sends to world ranks. Never waits; a notice that cannot be sent is lost, and waits end at their deadline.
  void send(std::vector<int> const& world_ranks, Notice const& notice) noexcept {
    if (world_ranks.empty() || !process().initialized.load()) return;
    try {
      std::scoped_lock const lock(mutex_);
      sent_.remove_if([](Sent& sent) {
        int complete = 0;
        return MPI_Test(&sent.request, &complete, MPI_STATUS_IGNORE) == MPI_SUCCESS && complete != 0;
      });
      for (auto const rank : world_ranks) {
        auto& sent = sent_.emplace_back(Sent{notice, MPI_REQUEST_NULL});
        MPI_Isend(&sent.notice, sizeof(Notice), MPI_BYTE, rank, 0, comm_, &sent.request);
      }
    } catch (std::exception const&) {  // no memory for a copy
    }
  }

  /// Takes in what has come.
  void collect() {
    std::unique_lock const lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return;  // another thread does
    for (;;) {
      int found = 0;
      MPI_Message message = MPI_MESSAGE_NULL;
      MPI_Status status;
      check(MPI_Improbe(MPI_ANY_SOURCE, 0, comm_, &found, &message, &status), "MPI_Improbe");
      if (found == 0) return;
      Notice notice;
      check(MPI_Mrecv(&notice, sizeof notice, MPI_BYTE, &message, MPI_STATUS_IGNORE), "MPI_Mrecv");
      auto const box = subjects_.find(notice.subject);
      if (box == subjects_.end()) continue;  // of a communicator that has ended here
      auto& notices = box->second;
      std::erase_if(notices, [&](Received const& old) {
        return old.from == status.MPI_SOURCE && old.notice.kind == notice.kind &&
               old.notice.record.set == notice.record.set;
      });
      notices.push_back({status.MPI_SOURCE, notice});
    }
  }

  /// The latest notices about `subject`.
  std::vector<Received> about(std::uint64_t subject) const {
    std::scoped_lock const lock(mutex_);
    auto const box = subjects_.find(subject);
    return box == subjects_.end() ? std::vector<Received>{} : box->second;
  }

 private:
  struct Sent {
    Notice notice;
    MPI_Request request;
  };

  mutable std::mutex mutex_;
  MPI_Comm comm_ = MPI_COMM_NULL;
  std::list<Sent> sent_;  // not yet on their way
  std::map<std::uint64_t, std::vector<Received>> subjects_;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::mpi::detail
