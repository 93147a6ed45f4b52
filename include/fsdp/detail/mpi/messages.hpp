// SPDX-License-Identifier: Apache-2.0
// Messages between ranks that do not share a node: rounds of sends and receives in flight.
#pragma once

#include <cstddef>
#include <list>
#include <vector>

#include "fsdp/detail/mpi/header.hpp"
#include "fsdp/detail/mpi/wait.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::mpi::detail {

/// Sends and receives of one communicator, in rounds that complete in order. Used by one thread.
///
/// All messages between two ranks carry one tag: MPI matches them in the order in which they were posted, which is the
/// same on both sides, since every rank runs the same collectives in the same order.
class Messages {
 public:
  static constexpr std::size_t chunk_bytes = std::size_t{1} << 20;  ///< size of one message; far below the range of int

  explicit Messages(MPI_Comm comm) : comm_(comm) {}

  /// Adds to the round that is being composed. At most chunk_bytes; nothing is exchanged for 0 bytes.
  void receive(int from, void* to, std::size_t bytes) {
    if (bytes == 0) return;
    auto& request = add(from, true);
    check(MPI_Irecv(to, static_cast<int>(bytes), MPI_BYTE, from, tag, comm_, &request), "MPI_Irecv");
  }
  void send(int to, void const* from, std::size_t bytes) {
    if (bytes == 0) return;
    auto& request = add(to, false);
    check(MPI_Isend(from, static_cast<int>(bytes), MPI_BYTE, to, tag, comm_, &request), "MPI_Isend");
  }
  /// Closes the round; it is in flight until wait_round has returned for it.
  void close_round() {
    if (spare_.empty()) spare_.emplace_back();
    flying_.splice(flying_.end(), open_);
    open_.splice(open_.begin(), spare_, spare_.begin());
  }
  std::size_t rounds_in_flight() const { return flying_.size(); }

  /// Waits until the oldest round is complete: its buffers may be read and overwritten.
  /// @param wait called as wait(done, pause, missing): see wait_until; missing() returns communicator ranks
  template <class Wait>
  void wait_round(Wait&& wait) {
    auto& round = flying_.front();
    if (!round.requests.empty()) {
      wait(
          [&] {
            int complete = 0;
            check(MPI_Testall(static_cast<int>(round.requests.size()), round.requests.data(), &complete,
                              MPI_STATUSES_IGNORE),
                  "MPI_Testall");
            return complete != 0;
          },
          PollPause{}, [&] { return round.unfinished(); });
    }
    round.clear();
    spare_.splice(spare_.begin(), flying_, flying_.begin());
  }
  template <class Wait>
  void wait_all(Wait&& wait) {
    while (!flying_.empty()) wait_round(wait);
  }

  /// Takes back receives that nothing has come for, after a failure.
  /// @return false if MPI may still read or write buffers of messages: they must stay
  bool abandon() noexcept {
    bool quiet = true;
    close_round();
    for (auto& round : flying_) {
      for (std::size_t i = 0; i < round.requests.size(); ++i) {
        int complete = 0;
        if (round.requests[i] != MPI_REQUEST_NULL && round.receives[i]) MPI_Cancel(&round.requests[i]);
        if (MPI_Test(&round.requests[i], &complete, MPI_STATUS_IGNORE) != MPI_SUCCESS || complete == 0) quiet = false;
      }
    }
    flying_.clear();
    return quiet;
  }

 private:
  static constexpr int tag = 1;

  struct Round {
    std::vector<MPI_Request> requests;
    std::vector<int> peers;
    std::vector<bool> receives;

    void clear() {
      requests.clear();
      peers.clear();
      receives.clear();
    }
    std::vector<int> unfinished() {
      std::vector<int> ranks;
      for (std::size_t i = 0; i < requests.size(); ++i) {
        int complete = 0;
        MPI_Request_get_status(requests[i], &complete, MPI_STATUS_IGNORE);
        if (complete == 0 && (ranks.empty() || ranks.back() != peers[i])) ranks.push_back(peers[i]);
      }
      return ranks;
    }
  };

  MPI_Request& add(int peer, bool receives) {
    auto& round = open_.front();
    round.peers.push_back(peer);
    round.receives.push_back(receives);
    return round.requests.emplace_back(MPI_REQUEST_NULL);
  }

  MPI_Comm comm_;
  std::list<Round> open_{1};  // one: it is being composed
  std::list<Round> flying_;
  std::list<Round> spare_;  // for the next ones: rounds keep their memory
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::mpi::detail
