// SPDX-License-Identifier: Apache-2.0
// What the ranks of one process share: who has enqueued which collective, with which buffers and events.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "fsdp/comm/text.hpp"
#include "fsdp/concepts.hpp"
#include "fsdp/error.hpp"
#include "fsdp/host/backoff.hpp"

namespace fsdp::local::detail {

enum class Operation : unsigned char { all_gather, reduce_scatter, all_reduce, broadcast };

constexpr std::string_view name(Operation operation) {
  constexpr std::array<std::string_view, 4> names{"all_gather", "reduce_scatter", "all_reduce", "broadcast"};
  return names[static_cast<std::size_t>(operation)];
}

using comm::Text;

/// What a rank says about a collective that it enqueues.
struct Request {
  Operation operation{};
  DType dtype{};
  std::size_t count = 0;
  int root = 0;           // of a broadcast
  bool in_place = false;  // of an all-reduce: the two forms run differently
  void const* send = nullptr;
  void* recv = nullptr;
  Text unit;
  Text pass;

  bool agrees(Request const& other) const {
    return operation == other.operation && dtype == other.dtype && count == other.count && root == other.root &&
           in_place == other.in_place && unit == other.unit;
  }
  std::string describe() const {
    auto const form = operation == Operation::broadcast ? fmt::format(" from rank {}", root)
                      : in_place                        ? std::string{" in place"}
                                                        : std::string{};
    return fmt::format("{}{} of {} {} for unit '{}' ({})", name(operation), form, count, fsdp::name(dtype), unit.view(),
                       pass.view());
  }
};

/// What one rank publishes in one group. Only that rank writes it.
/// [Note: Reuse of published entries] A rank that enqueues collective k has seen every peer publish k - 1, so every
/// peer has left the enqueueing of k - 2: entries of the last two collectives are in use, older ones are read by nobody
/// but wait_for_peers. That reads an entry's `done` event, which its owner records again only after a rendezvous that
/// the reader takes part in, thus never while it reads. Hence a ring; its depth only decides how old a ticket may be
/// before waiting for it means waiting for a later collective.
template <class D>
struct Lane {
  static constexpr std::size_t depth = 16;
  static constexpr std::uint64_t left_in_order = 1;
  static constexpr std::uint64_t left_by_exception = 2;

  struct Entry {
    explicit Entry(D const& device)
        : ready(device.make_event()), partial(device.make_event()), done(device.make_event()) {}
    Request request;
    typename D::Event ready;    // the input is complete
    typename D::Event partial;  // this rank's share of an all-reduce is complete
    typename D::Event done;     // this rank has read its peers' inputs
  };

  explicit Lane(D const& device) {
    entries.reserve(depth);
    for (std::size_t i = 0; i < depth; ++i) entries.emplace_back(device);
  }
  Entry& entry(std::uint64_t sequence) { return entries[sequence % depth]; }

  /// Makes everything written so far visible to peers that see `value`, and wakes them.
  void announce(std::atomic<std::uint64_t>& what, std::uint64_t value) {
    what.store(value, std::memory_order_release);
    changes.fetch_add(1, std::memory_order_relaxed);
    host::wake_sleepers(changes, sleepers);
  }

  std::vector<Entry> entries;
  // The latest collective whose request, partial event, done event is there; the latest exchange; whether the rank
  // left.
  alignas(64) std::atomic<std::uint64_t> published{0};
  std::atomic<std::uint64_t> partial{0};
  std::atomic<std::uint64_t> done{0};
  std::atomic<std::uint64_t> exchanged{0};
  std::atomic<std::uint64_t> left{0};
  std::atomic<std::uint32_t> changes{0};
  std::atomic<std::uint32_t> sleepers{0};
  std::array<std::string, 2> texts;  // of the last two exchanges
  std::array<Text, 2> whats;         // and what they are
  std::shared_ptr<void> child;       // the board of the group that this rank founds, during a split
};

/// What all groups of one run share: the first failure, and memory that peers may have been reading when it came.
template <class D>
class Run {
 public:
  explicit Run(int ranks) : ranks_(ranks) {}
  Run(Run const&) = delete;
  Run& operator=(Run const&) = delete;
  ~Run() {
    for (auto const& memory : abandoned_) memory.device.deallocate(memory.data, memory.bytes);
  }

  int ranks() const { return ranks_; }
  /// Records that `rank` failed, unless another rank failed before.
  void poison(int rank, std::string_view reason) noexcept {
    std::lock_guard const lock{mutex_};
    if (failed_rank_.load(std::memory_order_relaxed) >= 0) return;
    try {
      reason_ = reason;
    } catch (...) {
      reason_.clear();
    }
    failed_rank_.store(rank, std::memory_order_release);
  }
  bool poisoned() const { return failed_rank() >= 0; }
  int failed_rank() const { return failed_rank_.load(std::memory_order_acquire); }
  std::string const& reason() const { return reason_; }

  /// Keeps memory until every rank is gone.
  void abandon(D const& device, void* data, std::size_t bytes) {
    std::lock_guard const lock{mutex_};
    abandoned_.push_back({device, data, bytes});
  }

 private:
  struct Memory {
    D device;
    void* data;
    std::size_t bytes;
  };
  int ranks_;
  std::atomic<int> failed_rank_{-1};
  std::mutex mutex_;
  std::string reason_;
  std::vector<Memory> abandoned_;
};

/// One group of ranks.
template <class D>
class Board {
 public:
  Board(std::shared_ptr<Run<D>> run, std::vector<int> members)
      : run_(std::move(run)), members_(std::move(members)), lanes_(members_.size()) {}

  int size() const { return static_cast<int>(members_.size()); }
  /// The rank's number in the whole run, for messages.
  int world_rank(int rank) const { return members_[static_cast<std::size_t>(rank)]; }
  Run<D>& run() const { return *run_; }
  std::shared_ptr<Run<D>> const& shared_run() const { return run_; }
  Lane<D>& lane(int rank) const { return *lanes_[static_cast<std::size_t>(rank)]; }

  /// Takes a seat; returns when all members have theirs.
  void enter(int rank, D const& device) {
    lanes_[static_cast<std::size_t>(rank)] = std::make_unique<Lane<D>>(device);
    entered_.fetch_add(1, std::memory_order_acq_rel);
    host::wake_sleepers(entered_, sleepers_);
    host::Backoff backoff;
    auto const all = static_cast<std::uint32_t>(size());
    for (;;) {
      auto const seen = entered_.load(std::memory_order_acquire);
      if (seen == all) return;
      throw_if_poisoned(rank);
      backoff.pause(entered_, seen, sleepers_, [&] {
        return fmt::format("rank {} has seen {} of {} ranks enter their group", world_rank(rank), seen, all);
      });
    }
  }

  /// Waits until `peer` has announced `value` of `what`.
  /// @throws PeerError if a rank of the run fails first, or if the peer leaves the group without
  template <class Describe>
  void await(int rank, int peer, std::atomic<std::uint64_t> const& what, std::uint64_t value,
             Describe const& describe) {
    auto& from = lane(peer);
    host::Backoff backoff;
    for (;;) {
      auto const seen = from.changes.load(std::memory_order_relaxed);
      auto const left = from.left.load(std::memory_order_acquire);
      if (what.load(std::memory_order_acquire) >= value) return;
      throw_if_poisoned(rank);
      if (left == Lane<D>::left_by_exception) await_reason(rank);
      if (left != 0) {
        fail<PeerError>("rank {}: {}, but rank {} has left the group{}", world_rank(rank), describe(), world_rank(peer),
                        left == Lane<D>::left_by_exception ? " after an exception" : "");
      }
      backoff.pause(from.changes, seen, from.sleepers, [&] {
        return fmt::format("rank {}: {}: rank {} does not come", world_rank(rank), describe(), world_rank(peer));
      });
    }
  }

  /// An exception is on its way through a peer's code: gives it a second to be reported with its text.
  void await_reason(int rank) const {
    for (int round = 0; round < 1000; ++round) {
      throw_if_poisoned(rank);
      std::this_thread::sleep_for(std::chrono::milliseconds{1});
    }
  }

  void throw_if_poisoned(int rank) const {
    if (auto const failed = run_->failed_rank(); failed >= 0) {
      fail<PeerError>("rank {}: rank {} failed: {}", world_rank(rank), failed, run_->reason());
    }
  }

 private:
  std::shared_ptr<Run<D>> run_;
  std::vector<int> members_;
  std::vector<std::unique_ptr<Lane<D>>> lanes_;
  std::atomic<std::uint32_t> entered_{0};
  std::atomic<std::uint32_t> sleepers_{0};
};

}  // namespace fsdp::local::detail
