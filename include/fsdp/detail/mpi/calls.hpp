// SPDX-License-Identifier: Apache-2.0
// The calls of the ranks of a node, in order, and the first failure of a communicator, in shared memory. A waiting
// rank finds peers that have made different calls.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/detail/comm/messages.hpp"
#include "fsdp/detail/mpi/shared_arena.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::mpi::detail {

template <std::size_t N>
void copy_text(char (&to)[N], std::string_view text) {
  auto const length = std::min(text.size(), N - 1);
  std::copy_n(text.data(), length, to);
  to[length] = '\0';
}

/// A failure in shared memory. The first text and the earliest collective count. A rank that fails in one has done its
/// part of those before: peers that are still in them wait on, for what is under way. Zeroed memory is a note without a
/// failure.
struct FailureNote {
  static constexpr std::size_t most_text = 1024;
  static constexpr std::uint64_t none = std::numeric_limits<std::uint64_t>::max();  ///< collectives that can fail
  /// number of a wait outside of collectives
  static constexpr std::uint64_t any = none - 1;

  std::atomic<std::uint64_t> since{none};  ///< collectives from this number on are not run any more
  std::atomic<std::uint32_t> state{0};     ///< of the text. 0: none, 1: being written, 2: set
  std::uint32_t is_order_error = 0;
  char text[most_text] = {};

  /// @param collective  number of the one that waits: its peers' failures in later ones do not concern it
  bool failed(std::uint64_t collective = any) const {
    return since.load(std::memory_order_acquire) <= collective && state.load(std::memory_order_acquire) == 2;
  }
  /// @param collective  in which the rank failed; 0: all are concerned
  /// @return whether that ends more waits than before
  bool set(std::string_view what, bool order_error, std::uint64_t collective = 0) {
    std::uint32_t empty = 0;
    if (state.compare_exchange_strong(empty, 1)) {
      is_order_error = order_error ? 1 : 0;
      copy_text(text, what);
      state.store(2, std::memory_order_release);
    }
    auto earliest = since.load();
    while (collective < earliest)
      if (since.compare_exchange_weak(earliest, collective)) return true;
    return false;
  }
  /// Removes the failure. @pre no other thread uses it
  void forget() {
    since.store(none);
    state.store(0);
  }
  /// @pre failed()
  [[noreturn]] void raise(int world_rank) const {
    std::string const what = static_cast<char const*>(text);
    if (is_order_error != 0) fail<OrderError>("rank {}: {}", world_rank, what);
    throw PeerError(what);  // it names the rank where it began
  }
};

/// The failure of a stream of this process that no call has thrown before the end of its engine.
inline FailureNote& deferred_failure() {
  static FailureNote note;
  return note;
}

/// Sets of ranks of one world whose calls are followed: an engine has four.
inline constexpr std::size_t most_call_sets = 8;

/// A call, and the number of calls that its rank had then made in the communicators of each set of ranks, with this
/// one.
struct CallRecord {
  struct Count {
    std::uint32_t set = 0;  ///< 0: none
    std::uint32_t calls = 0;
  };
  comm::CallNote note;
  std::uint32_t set = 0;  ///< the ranks of the call's communicator; 0: the call is not followed
  std::uint32_t number = 0;
  std::array<Count, most_call_sets> counts{};

  std::optional<std::uint32_t> calls_of(std::uint32_t ranks) const {
    for (auto const& count : counts)
      if (count.set == ranks) return count.calls;
    return std::nullopt;
  }
};
/// The latest calls of a rank: a few steps of an engine. A rank that is further ahead of a peer is not followed.
using CallRing = comm::NoteRing<CallRecord, 1024>;

/// Values that collectives compare when they meet: a call's number among the ranks of its communicator, and how many
/// calls its rank had made among all ranks of the world.
struct CallNumbers {
  std::uint32_t own = 0;  ///< 0: not followed
  std::uint32_t all = 0;

  CallNumbers() = default;
  explicit CallNumbers(CallRecord const& call) : own(call.number), all(call.counts.front().calls) {}

  bool agree(CallNumbers const& other) const {
    return own == 0 || other.own == 0 || (own == other.own && all == other.all);
  }
};

/// The calls of one set of ranks in all communicators that they form. Its memory lives as long as the WorldState.
class CallLog {
 public:
  /// The part of each rank in the set's segment.
  struct Block {
    CallRing calls;
    FailureNote failure;  // of the world; that of its first rank is used
  };

  static std::uint32_t id_of(std::vector<int> const& world_ranks) {
    std::string text;
    for (auto const rank : world_ranks) text += formatted("{} ", rank);
    return static_cast<std::uint32_t>(comm::hash_of(text) >> 32) | 1;
  }

  /// @param members  world ranks, ascending    @param on_node  those on this node, ascending
  CallLog(Segment segment, std::vector<int> members, std::vector<int> on_node, int world_rank)
      : segment_(std::move(segment)), members_(std::move(members)), on_node_(std::move(on_node)), id_(id_of(members_)) {
    own_ = new (block(world_rank)) Block;
  }

  std::uint32_t id() const { return id_; }
  std::vector<int> const& members() const { return members_; }
  CallRing& own() { return own_->calls; }
  FailureNote& first_failure() { return *failure(on_node_.front()); }
  /// nullptr if the rank is not in the set, or on another node.
  CallRing const* ring(int world_rank) const {
    if (!std::binary_search(on_node_.begin(), on_node_.end(), world_rank)) return nullptr;
    return &std::launder(reinterpret_cast<Block*>(block(world_rank)))->calls;
  }

 private:
  FailureNote* failure(int world_rank) const {
    return &std::launder(reinterpret_cast<Block*>(block(world_rank)))->failure;
  }
  std::byte* block(int world_rank) const {
    auto const place = std::lower_bound(on_node_.begin(), on_node_.end(), world_rank) - on_node_.begin();
    return segment_.mapping.base() + static_cast<std::size_t>(place) * segment_.stride;
  }

  Segment segment_;
  std::vector<int> members_, on_node_;
  std::uint32_t id_;
  Block* own_ = nullptr;
};

/// Calls of two ranks that contradict each other: see [Note: One order over all communicators].
struct Contradiction {
  CallRecord mine, theirs;

  /// The message of the contradiction: equal on both ranks.
  std::string text(int rank, int peer) const {
    if (peer < rank) return Contradiction{theirs, mine}.text(peer, rank);
    if (mine.note.place != theirs.note.place)
      return formatted("ranks disagree about the order of their calls: rank {} calls {}, but rank {} calls {}", rank,
                       mine.note.text(), peer, theirs.note.text());
    auto ours = mine.number, others = theirs.number;
    for (auto const& count : mine.counts) {
      auto const their_count = theirs.calls_of(count.set).value_or(count.calls);
      if (count.set != 0 && count.calls != their_count) ours = count.calls, others = their_count;
    }
    return formatted(
        "ranks disagree about the order of their calls: rank {} calls {} after {} calls in groups to which both "
        "belong, rank {} calls it after {}: one of them has made a call that the other has not",
        rank, mine.note.text(), ours, peer, others);
  }
};

/// Calls of this rank, and of the ranks of its node, in all communicators split from one world.
///
/// [Note: One order over all communicators] Two ranks call the communicators that both belong to in one order. Calls
/// are counted for each set of ranks, and a call's record holds all counts. So a contradiction is a pair of records:
/// - both ranks' i-th call among the same ranks, in different communicators, or after different numbers of calls among
///   other ranks that both belong to;
/// - one's i-th call among some ranks, made before its j-th among others, and the other's j-th, made before its i-th.
/// Neither depends on when the records are read, nor on who waits for what: no alarm is false, and nobody needs to
/// agree on a time. That matters here: a host thread does not wait in collectives, so what it will call next is not
/// known. Ranks that recover from an error may have made different calls until then: theirs are not followed any more.
class CallBook {
 public:
  /// Host thread only. @return nullptr if calls of these ranks are not followed
  CallLog* find(std::vector<int> const& members) const {
    for (auto const& log : logs())
      if (log->members() == members) return log.get();
    return nullptr;
  }
  bool is_empty() const { return logs().empty(); }
  bool has_room() const { return logs().size() < logs_.size(); }
  /// Host thread only. @pre has_room()
  CallLog* add(std::unique_ptr<CallLog> log) {
    auto const index = logs().size();
    counts_[index].set = log->id();
    logs_[index] = std::move(log);
    size_.store(index + 1, std::memory_order_release);
    return logs_[index].get();
  }

  /// Writes down a call in a communicator of the log's ranks. Host thread only.
  CallRecord enter(CallLog* log, comm::CallNote const& note) {
    CallRecord record;
    record.note = note;
    if (log == nullptr || stopped_.load(std::memory_order_relaxed)) return record;
    for (auto& count : counts_)
      if (count.set == log->id()) record.number = ++count.calls;
    record.set = log->id();
    record.counts = counts_;
    log->own().write(record.number, record);
    return record;
  }
  /// A call as another rank's numbers tell of it. @pre the first log of the world is of all ranks
  CallRecord record_of(CallLog const& log, comm::CallNote const& note, CallNumbers numbers) const {
    CallRecord record;
    record.note = note;
    record.set = log.id();
    record.number = numbers.own;
    record.counts[0] = {log.id(), numbers.own};
    record.counts[1] = {logs().front()->id(), numbers.all};
    return record;
  }

  /// Calls that are made from now on are not followed. Any thread, before the host thread learns of an error.
  void stop() noexcept { stopped_.store(true, std::memory_order_relaxed); }

  /// Finds a call of `owner`, a rank of this node (this one, too), that contradicts another rank's `call`. Any thread.
  std::optional<CallRecord> against(CallRecord const& call, int owner) const {
    for (auto const& log : logs()) {
      auto const* const ring = log->ring(owner);
      if (ring == nullptr || call.set == 0) continue;
      if (log->id() == call.set) {
        auto const theirs = ring->read(call.number);
        if (theirs && differ(call, *theirs)) return theirs;
      } else if (auto const before = call.calls_of(log->id())) {
        auto const theirs = ring->read(*before + 1);
        if (theirs && theirs->calls_of(call.set).value_or(call.number) < call.number) return theirs;
      }
    }
    return std::nullopt;
  }

  /// The earliest contradiction to `peer` among the same ranks that is still written down
  /// here, or the one that was `found`.
  Contradiction earliest(Contradiction const& found, int peer) const {
    auto const last = std::min(found.mine.number, found.theirs.number);
    for (auto const& log : logs()) {
      auto const* const ring = log->ring(peer);
      if (log->id() != found.mine.set || ring == nullptr) continue;
      for (auto number = last - std::min<std::uint32_t>(last, CallRing::depth); ++number <= last;) {
        auto const mine = log->own().read(number);
        auto const theirs = ring->read(number);
        if (mine && theirs && differ(*mine, *theirs)) return {*mine, *theirs};
      }
    }
    return found;
  }

  /// This rank's last calls before `call` among the same ranks, for messages.
  std::string before(CallRecord const& call) const {
    std::string text;
    for (auto const& log : logs()) {
      if (log->id() != call.set) continue;
      for (auto number = call.number - std::min<std::uint32_t>(call.number, 6); ++number < call.number;)
        if (auto const earlier = log->own().read(number))
          text += formatted("{}{}", text.empty() ? "" : ", ", earlier->note.text());
    }
    return text;
  }

  /// @return whether two ranks' calls among the same ranks contradict each other: they meet, or have equal numbers
  static bool differ(CallRecord const& a, CallRecord const& b) {
    if (a.set == 0 || b.set == 0) return false;
    if (a.note.place != b.note.place || a.number != b.number) return true;
    return std::any_of(a.counts.begin(), a.counts.end(), [&](CallRecord::Count const& count) {
      return count.set != 0 && b.calls_of(count.set).value_or(count.calls) != count.calls;
    });
  }

 private:
  std::span<std::unique_ptr<CallLog> const> logs() const {
    return {logs_.data(), size_.load(std::memory_order_acquire)};
  }

  std::array<std::unique_ptr<CallLog>, most_call_sets> logs_;
  std::atomic<std::size_t> size_{0};
  std::array<CallRecord::Count, most_call_sets> counts_{};
  std::atomic<bool> stopped_{false};
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::mpi::detail
