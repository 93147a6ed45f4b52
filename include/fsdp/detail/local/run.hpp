// SPDX-License-Identifier: Apache-2.0
// State shared by all groups of a run of threads: the first failure, the wait-for graph, memory that outlives a
// failure.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "fsdp/detail/base/fixed_array.hpp"
#include "fsdp/detail/comm/messages.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::local::detail {

/// The wait-for graph over all groups of a run.
///
/// [Note: Ranks that wait for each other] A rank enters its groups' calls one after another, and announces each to that
/// call's group before it waits there. It counts its calls. Who waits long writes down: "in my call i I wait for rank
/// p, which had announced j calls when the one that I need was not among them". That stays true: the rank leaves call i
/// when p makes a call after its j-th, not before. If p in turn waits in its call j, and so on back to call i of the
/// first, then none of them ever goes on. No clock and no consistent snapshot is needed for that: each link of the
/// circle is a fact by itself, however old. And every deadlock of ranks is such a circle, since each waits for one
/// rank.
class WaitGraph {
 public:
  explicit WaitGraph(int ranks) : ranks_(static_cast<std::size_t>(ranks)) {}

  /// Records that `rank` is about to announce a call. @return its number
  std::uint64_t begin(int rank, comm::CallNote const& note) {
    auto& own = at(rank);
    auto const number = own.announced.load(std::memory_order_relaxed) + 1;
    own.notes.write(number, note);
    return number;
  }
  /// Records that call `number` is announced to its group.
  void announced(int rank, std::uint64_t number) { at(rank).announced.store(number, std::memory_order_release); }
  /// @return number of calls that `rank` has announced, which are visible now. For waits that last
  std::uint64_t announced(int rank) const { return at(rank).announced.load(std::memory_order_acquire); }

  /// Records that `rank` waits in its call for `peer`, whose first `seen` calls do not have what it needs.
  /// @return a text of the circle that this closes; "" if there is none
  std::string wait(int rank, std::uint64_t call, int peer, std::uint64_t seen) {
    at(rank).link.store(pack(call, peer, seen), std::memory_order_relaxed);
    std::array<int, 1 << peer_bits> circle;
    circle[0] = rank;
    std::size_t size = 1;
    while (peer != rank) {
      auto const link = at(peer).link.load(std::memory_order_relaxed);
      if (link == 0 || (link >> (peer_bits + count_bits)) != low(seen) || size == ranks_.size()) return {};
      circle[size++] = peer;
      peer = static_cast<int>(link & ((1u << peer_bits) - 1));
      seen = link >> peer_bits & count_mask;
    }
    return low(seen) == low(call) ? text_of({circle.data(), size}) : std::string{};
  }
  void end_wait(int rank) { at(rank).link.store(0, std::memory_order_relaxed); }

 private:
  // A link in one word: own call, calls of the peer that were seen (both modulo 2^27), the peer.
  static constexpr int peer_bits = 10;
  static constexpr int count_bits = 27;
  static constexpr std::uint64_t count_mask = (std::uint64_t{1} << count_bits) - 1;

  struct alignas(64) Caller {
    std::atomic<std::uint64_t> announced{0};
    std::atomic<std::uint64_t> link{0};  // 0: waits for nobody, or not for long
    comm::NoteRing<comm::CallNote, 4> notes;
  };

  static std::uint64_t low(std::uint64_t count) { return count & count_mask; }
  static std::uint64_t pack(std::uint64_t call, int peer, std::uint64_t seen) {
    return low(call) << (peer_bits + count_bits) | low(seen) << peer_bits | static_cast<std::uint64_t>(peer);
  }
  Caller& at(int rank) { return ranks_[static_cast<std::size_t>(rank)]; }
  Caller const& at(int rank) const { return ranks_[static_cast<std::size_t>(rank)]; }

  /// The text of a circle, from its lowest rank on: equal on all ranks that find it.
  [[gnu::cold]] std::string text_of(std::span<int const> circle) const {
    auto const size = circle.size();
    std::size_t first = 0;
    for (std::size_t i = 1; i < size; ++i)
      if (circle[i] < circle[first]) first = i;
    std::string text = "ranks disagree about the order of their calls: ";
    for (std::size_t i = 0; i < size; ++i) {
      int const rank = circle[(first + i) % size], awaited = circle[(first + i + 1) % size];
      auto const& caller = at(rank);
      auto const note = caller.notes.read(caller.announced.load(std::memory_order_relaxed));
      text += formatted("{}rank {} is in {} and waits for rank {}", i == 0 ? "" : ", ", rank,
                        note ? note->text() : "another call", awaited);
    }
    return text;
  }

  fsdp::detail::FixedArray<Caller> ranks_;
};

/// Tells `rank` that `peer` has failed. If the peer failed because of a third rank, that cause is passed on.
[[noreturn, gnu::cold]] inline void throw_told(int rank, int peer, Failure const& why) {
  auto const prefix = formatted("rank {}: ", peer);
  auto text = peer_failure(peer, why).text;
  if (why.kind == ErrorKind::peer && text.starts_with(prefix)) text.erase(0, prefix.size());
  fail<PeerError>("rank {}: {}", rank, text);
}

/// State shared by all groups of one run: the first failure, the wait-for graph, and memory that peers may have been
/// reading when the failure came.
template <class D>
class Run {
 public:
  static constexpr int max_ranks = 1 << 10;  ///< limit of WaitGraph

  explicit Run(int ranks)
      : ranks_(ranks),
        waits_(ranks),
        left_(static_cast<std::size_t>(ranks)),
        ended_(static_cast<std::size_t>(ranks)),
        ends_(static_cast<std::size_t>(ranks)) {}
  Run(Run const&) = delete;
  Run& operator=(Run const&) = delete;
  [[gnu::cold]] ~Run() {
    // Work that ranks have left behind may still read what their peers have, on another device than where it lies.
    if constexpr (synchronizes_all)
      if (abandoned_ != nullptr)
        for (auto const* rank = devices_; rank != nullptr; rank = rank->next) rank->device.synchronize_all();
    for (; abandoned_ != nullptr; forget(abandoned_))
      abandoned_->device.deallocate(abandoned_->data, abandoned_->bytes);
    while (devices_ != nullptr) forget(devices_);
  }

  int ranks() const { return ranks_; }
  WaitGraph& waits() { return waits_; }
  /// A number that no other group of the run has.
  std::uint64_t next_group() { return groups_.fetch_add(1, std::memory_order_relaxed); }

  /// Records that `rank` has ended, and joins no call any more.
  void end(int rank) noexcept { ended_[static_cast<std::size_t>(rank)].store(true, std::memory_order_release); }
  bool has_ended(int rank) const { return ended_[static_cast<std::size_t>(rank)].load(std::memory_order_acquire); }
  /// Records a failure of `rank` that no call has thrown. The first of them counts.
  void leave(int rank, Failure const& why) noexcept {
    std::lock_guard const lock{mutex_};
    try {
      auto& left = left_[static_cast<std::size_t>(rank)];
      if (!left.some) left = {true, why};
    } catch (...) {  // no memory for the text
    }
  }
  /// @throws the failure that `rank` has left, if any
  void raise_left(int rank) const {
    std::lock_guard const lock{mutex_};
    if (auto const& left = left_[static_cast<std::size_t>(rank)]; left.some) left.why.raise();
  }
  /// Records that `rank` has failed, and ends. Peers learn it where they wait for the rank, and not before.
  void set_failed(int rank, Failure const& why) noexcept { note(rank, why, false); }
  /// Records that ranks cannot go on together, as `rank` has found out.
  void disagree(int rank, std::string_view how) noexcept {
    note(rank, {ErrorKind::order, std::string(how)}, true);
    disagreed_.store(true, std::memory_order_release);
  }
  bool disagreed() const { return disagreed_.load(std::memory_order_acquire); }
  bool poisoned() const { return failed_rank() >= 0; }
  int failed_rank() const { return failed_rank_.load(std::memory_order_acquire); }
  /// @throws PeerError or OrderError, for `rank`, if some rank has failed
  void throw_if_poisoned(int rank) const {
    auto const failed = failed_rank();
    if (failed < 0) return;
    throw_failure(rank, failed);
  }

  /// Ends of the engines of `rank`. Used by its thread.
  comm::EngineEnds& ends(int rank) { return ends_[static_cast<std::size_t>(rank)]; }
  /// @throws OrderError if ranks' engines have ended differently. @pre all ranks' threads have ended
  [[gnu::cold]] void expect_equal_ends() const {
    fsdp::detail::FixedArray<std::span<comm::EngineEnd const>> by_rank(ends_.size());
    for (std::size_t rank = 0; rank < ends_.size(); ++rank) by_rank[rank] = ends_[rank].list();
    if (auto const text = comm::difference(by_rank); !text.empty()) fail<OrderError>("{}", text);
  }

  /// Adds the device of a rank of the run.
  [[gnu::cold]] void add_device([[maybe_unused]] D const& device) {
    if constexpr (synchronizes_all) {
      std::lock_guard const lock{mutex_};
      devices_ = new Memory{devices_, device};
    }
  }
  /// Keeps memory until every rank is gone.
  [[gnu::cold]] void abandon(D const& device, void* data, std::size_t bytes) {
    std::lock_guard const lock{mutex_};
    abandoned_ = new Memory{abandoned_, device, data, bytes};
  }

 private:
  static constexpr bool synchronizes_all = requires(D const& device) { device.synchronize_all(); };
  /// A failure that no call has thrown.
  struct Left {
    bool some = false;
    Failure why;
  };
  /// Memory on a device, in a list: a vector of these takes longer to compile.
  struct Memory {
    Memory* next;
    D device;
    void* data = nullptr;
    std::size_t bytes = 0;
  };
  static void forget(Memory*& first) { delete std::exchange(first, first->next); }

  [[noreturn, gnu::cold]] void throw_failure(int rank, int failed) const {
    if (disagreement_) fail<OrderError>("rank {}: {}", rank, why_.text);
    throw_told(rank, failed, why_);
  }
  [[gnu::cold]] void note(int rank, Failure const& why, bool disagreement) noexcept {
    std::lock_guard const lock{mutex_};
    if (failed_rank_.load(std::memory_order_relaxed) >= 0) return;
    try {
      why_ = why;
    } catch (...) {  // no memory for the text
      why_.text.clear();
    }
    disagreement_ = disagreement;
    failed_rank_.store(rank, std::memory_order_release);
  }

  int ranks_;
  WaitGraph waits_;
  std::atomic<int> failed_rank_{-1};
  std::atomic<std::uint64_t> groups_{1};
  mutable std::mutex mutex_;
  fsdp::detail::FixedArray<Left> left_;  // by rank
  Failure why_;
  bool disagreement_ = false;
  std::atomic<bool> disagreed_{false};
  Memory* abandoned_ = nullptr;
  Memory* devices_ = nullptr;                          // of all ranks, if they have synchronize_all
  fsdp::detail::FixedArray<std::atomic<bool>> ended_;  // by rank
  fsdp::detail::FixedArray<comm::EngineEnds> ends_;    // by rank
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::local::detail
