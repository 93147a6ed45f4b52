// SPDX-License-Identifier: Apache-2.0
// Messages among the ranks of a communicator on one node, through shared memory.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>
#include <type_traits>
#include <vector>

#include "fsdp/detail/comm/messages.hpp"
#include "fsdp/detail/mpi/calls.hpp"
#include "fsdp/detail/mpi/shared_arena.hpp"
#include "fsdp/detail/mpi/wait.hpp"
#include "fsdp/tensor.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::mpi::detail {

using comm::CallDescription;
using comm::Collective;
using comm::hash_of;

/// The call that a rank is about to make, and the place of its data. Read by node peers in place, sent to ranks on
/// other nodes.
struct Header {
  std::uint64_t sequence = 0;
  std::uint64_t count = 0;
  std::uint64_t unit_hash = 0;
  std::uint64_t history_hash = 0;
  std::int32_t root = 0;
  Collective collective{};
  DType type{};
  Place send, receive;
  CallNumbers numbers;
  char unit[64] = {};
  char pass[16] = {};
  char history[80] = {};

  bool agrees(Header const& other) const {
    return sequence == other.sequence && count == other.count && unit_hash == other.unit_hash &&
           history_hash == other.history_hash && root == other.root && collective == other.collective &&
           type == other.type;
  }
  /// Refers to the texts of this.
  CallDescription operation() const {
    return CallDescription::collective(collective, count, type, root, {unit, pass, history});
  }
};
static_assert(std::is_trivially_copyable_v<Header>);

/// A rank's part of the control block. The scratch area follows it.
///
/// Two headers would do: a rank publishes collective k + 1 after all peers have published k, and so have read the
/// headers of k - 1.
struct RankControl {
  SharedCounter ready;                 ///< collectives whose header is published and whose input may be read
  SharedCounter done;                  ///< collectives completed: peers' memory is no longer read
  SharedCounter step;                  ///< steps inside collectives: data in scratch, or a partial sum, are there
  SharedCounter calls;                 ///< control-plane calls entered
  std::atomic<std::uint64_t> left{0};  ///< 0: not yet; else the collectives enqueued, plus 1, times 2, and 1 more if an
                                       ///< exception was on its way. `calls` stands still then
  std::array<Header, 4> headers;

  static constexpr std::uint64_t departure(std::uint64_t collectives, bool by_exception) {
    return (collectives + 1) << 1 | (by_exception ? 1 : 0);
  }

  Header& header(std::uint64_t sequence) { return headers[sequence % headers.size()]; }
};

/// The control block of one communicator on one node.
class ControlBlock {
 public:
  static constexpr std::size_t scratch_per_rank = 256 * 1024;

  /// Half of a rank's scratch: one step's data. Room for a header per rank of the communicator at least.
  static std::size_t half_for(int ranks) {
    static_assert(sizeof(Header) >= 64 && sizeof(Header) % 8 == 0);
    return std::max(scratch_per_rank / 2, round_up(static_cast<std::size_t>(ranks) * sizeof(Header), 64));
  }
  static std::size_t bytes_for(int ranks) {
    return note_offset + round_up(sizeof(FailureNote), 64) + 2 * half_for(ranks);
  }

  ControlBlock() = default;
  /// @param members communicator ranks on the node, ascending
  ControlBlock(Segment segment, std::vector<int> const& members, int rank, int ranks)
      : segment_(std::move(segment)), place_of_(static_cast<std::size_t>(ranks), -1), half_(half_for(ranks)) {
    for (std::size_t i = 0; i < members.size(); ++i)
      place_of_[static_cast<std::size_t>(members[i])] = static_cast<int>(i);
    count_ = members.size();
    new (block(rank)) RankControl;
    if (rank == members.front()) new (block(rank) + note_offset) FailureNote;
  }

  RankControl& operator[](int rank) const { return *std::launder(reinterpret_cast<RankControl*>(block(rank))); }
  std::byte* scratch(int rank, std::uint64_t step) const {
    return block(rank) + note_offset + round_up(sizeof(FailureNote), 64) + step % 2 * half_;
  }
  std::size_t half() const { return half_; }

  /// The first failure of this communicator, for all ranks of the node.
  FailureNote& failure() const {
    return *std::launder(reinterpret_cast<FailureNote*>(segment_.mapping.base() + note_offset));
  }
  /// Wakes whoever sleeps: something has happened that is not counted.
  void wake_all() const {
    for (std::size_t i = 0; i < count_; ++i) {
      auto& control = *std::launder(reinterpret_cast<RankControl*>(segment_.mapping.base() + i * segment_.stride));
      for (auto* counter : {&control.ready, &control.done, &control.step}) counter->wake();
    }
  }

 private:
  static constexpr std::size_t note_offset = (sizeof(RankControl) + 63) / 64 * 64;

  std::byte* block(int rank) const {
    return segment_.mapping.base() +
           static_cast<std::size_t>(place_of_[static_cast<std::size_t>(rank)]) * segment_.stride;
  }
  Segment segment_;
  std::vector<int> place_of_;  // by communicator rank; -1: on another node
  std::size_t half_ = 0;
  std::size_t count_ = 0;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::mpi::detail
