// SPDX-License-Identifier: Apache-2.0
// State shared by the ranks of one process: the collectives that each has enqueued, with buffers and events.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "fsdp/concepts.hpp"
#include "fsdp/detail/base/fixed_array.hpp"
#include "fsdp/detail/comm/messages.hpp"
#include "fsdp/detail/host/backoff.hpp"
#include "fsdp/detail/local/run.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::local::detail {

using comm::CallDescription;
using comm::Collective;
using comm::Text;

/// The data of a collective.
struct Transfer {
  Collective collective{};
  DType dtype{};
  std::size_t count = 0;
  int root = 0;           // of a broadcast
  bool in_place = false;  // of an all-reduce: the two forms run differently
  void const* send = nullptr;
  void* recv = nullptr;

  std::size_t bytes(std::size_t elements) const { return elements * size_of(dtype); }
};

/// A rank's record of a collective that it enqueues.
struct Request : Transfer {
  Request() = default;
  Request(Transfer const& transfer, Label label)
      : Transfer(transfer), unit(label.unit), pass(label.pass), history(label.history) {}

  Text unit;
  Text pass;
  Text history;

  bool agrees(Request const& other) const {
    return collective == other.collective && dtype == other.dtype && count == other.count && root == other.root &&
           in_place == other.in_place && unit == other.unit && history == other.history;
  }
  /// Refers to the texts of this.
  [[gnu::noinline]] CallDescription operation() const {
    auto operation =
        CallDescription::collective(collective, count, dtype, root, {unit.view(), pass.view(), history.view()});
    operation.in_place = in_place;
    return operation;
  }
};

template <class D>
class Group;

/// Records that one rank publishes in one group. Only that rank writes them.
/// [Note: Reuse of published entries] A rank that enqueues collective k has seen every peer publish k - 1, so every
/// peer has left the enqueueing of k - 2: entries of the last two collectives are in use, older ones are read by nobody
/// but wait_for_peers. That reads an entry's `done` event, which its owner records again only after a rendezvous that
/// the reader takes part in, thus never while it reads. Hence a ring; its depth only decides how old a ticket may be
/// before waiting for it means waiting for a later collective.
template <class D>
struct Published {
  static constexpr std::size_t depth = 16;
  static constexpr std::uint64_t left_in_order = 1;
  static constexpr std::uint64_t left_by_exception = 2;
  static constexpr std::uint64_t failed = 3;  // in a collective of this group, or in a stream: `failure` says why

  struct Entry {
    explicit Entry(D const& device)
        : ready(device.make_event()), partial(device.make_event()), done(device.make_event()) {}
    Request request;
    typename D::Event ready;    // the input is complete
    typename D::Event partial;  // this rank's share of an all-reduce is complete
    typename D::Event done;     // this rank has read its peers' inputs
  };

  /// @param world_rank  the rank's number in the whole run
  [[gnu::cold]] Published(D const& on, int world_rank) : device(on) {
    for (auto& entry : entries) {
      entry.emplace(device);
      if constexpr (requires { entry->ready.set_rank(world_rank); })
        for (auto* event : {&entry->ready, &entry->partial, &entry->done}) event->set_rank(world_rank);
    }
  }
  Entry& entry(std::uint64_t sequence) { return *entries[sequence % depth]; }

  /// Makes everything written so far visible to peers that see `value`, and wakes them.
  void announce(std::atomic<std::uint64_t>& what, std::uint64_t value) {
    what.store(value, std::memory_order_release);
    changes.fetch_add(1, std::memory_order_relaxed);
    host::wake_sleepers(changes, sleepers);
  }

  D device;  // where the rank's memory is
  std::array<std::optional<Entry>, depth> entries;
  // The latest collective whose request, partial event, done event is there; the latest exchange; whether and how the
  // rank left.
  alignas(64) std::atomic<std::uint64_t> published{0};
  std::atomic<std::uint64_t> partial{0};
  std::atomic<std::uint64_t> done{0};
  std::atomic<std::uint64_t> exchanged{0};
  std::atomic<std::uint64_t> left{0};
  std::atomic<std::uint32_t> changes{0};
  std::atomic<std::uint32_t> sleepers{0};
  std::array<std::string, 2> texts;  // of the last two exchanges
  std::array<Text, 2> whats;         // and what they are
  Failure failure;                   // why the rank failed
  std::shared_ptr<Group<D>> child;   // the group that this rank founds, during a split
};

/// The ranks of a new group, by key, then by rank.
/// @param requests  what each rank asks for: its color and its key
[[gnu::cold]] inline std::vector<int> members_of(std::vector<std::string> const& requests, int color) {
  std::vector<int> members, keys;
  for (std::size_t peer = 0; peer < requests.size(); ++peer) {
    char* rest = nullptr;
    if (std::strtol(requests[peer].c_str(), &rest, 10) != color) continue;
    members.push_back(static_cast<int>(peer));
    keys.push_back(static_cast<int>(std::strtol(rest, nullptr, 10)));
    for (auto at = keys.size() - 1; at > 0 && keys[at - 1] > keys[at]; --at) {
      std::swap(keys[at - 1], keys[at]);
      std::swap(members[at - 1], members[at]);
    }
  }
  return members;
}

/// A group of ranks.
template <class D>
class Group {
 public:
  [[gnu::cold]] Group(std::shared_ptr<Run<D>> run, std::vector<int> members, std::string_view name)
      : run_(std::move(run)),
        members_(std::move(members)),
        published_(members_.size()),
        id_(run_->next_group()),
        name_(name) {}

  int size() const { return static_cast<int>(members_.size()); }
  /// The rank's number in the whole run, for messages.
  int world_rank(int rank) const { return members_[static_cast<std::size_t>(rank)]; }
  Run<D>& run() const { return *run_; }
  std::shared_ptr<Run<D>> const& shared_run() const { return run_; }
  Published<D>& published(int rank) const { return *published_[static_cast<std::size_t>(rank)]; }
  std::string const& name() const { return name_; }
  std::uint64_t id() const { return id_; }

  /// Announces a call of `rank`: what it has published before is there for peers that see `value` in `what`.
  /// @return the call's number among all of the rank's
  std::uint64_t announce_call(int rank, comm::CallNote const& note, std::atomic<std::uint64_t>& what,
                              std::uint64_t value) {
    auto& waits = run_->waits();
    auto const number = waits.begin(world_rank(rank), note);
    published(rank).announce(what, value);
    waits.announced(world_rank(rank), number);
    return number;
  }
  comm::CallNote note_of(Request const& request) const {
    return comm::CallNote::collective(id_, name_, request.operation());
  }
  comm::CallNote note_of_exchange(std::string_view what) const { return comm::CallNote::control(id_, name_, what); }

  /// Enters; returns when all members have.
  [[gnu::cold]] void enter(int rank, D const& device) {
    published_[static_cast<std::size_t>(rank)] = std::make_unique<Published<D>>(device, world_rank(rank));
    entered_.fetch_add(1, std::memory_order_acq_rel);
    host::wake_sleepers(entered_, sleepers_);
    host::Backoff backoff;
    auto const all = static_cast<std::uint32_t>(size());
    for (;;) {
      auto const seen = entered_.load(std::memory_order_acquire);
      if (seen == all) return;
      throw_if_poisoned(rank);
      backoff.pause(entered_, seen, sleepers_, [&] {
        return formatted("rank {} waits for the ranks of a new group: {} of {} have entered it", world_rank(rank), seen,
                         all);
      });
    }
  }

  using Counter = std::atomic<std::uint64_t> Published<D>::*;

  /// Waits until `peer` has announced `value` of `what`.
  /// @param call  the number of the call that the peer is yet to join; 0: it has joined
  /// @param operation  in which `rank` waits, for messages
  /// [Note: Failures count from a number] A peer's failure ends the waits for what the peer does not announce any more,
  /// and no others: all ranks join the same collectives before it, and do the same with the results. Whoever waits for
  /// a rank that has found out the same way learns it as soon as that one leaves.
  /// @throws PeerError if the peer fails first, or leaves the group without; OrderError if ranks wait for each other
  void await(int rank, int peer, Counter what, std::uint64_t value, std::uint64_t call,
             CallDescription const& operation) {
    auto& from = published(peer);
    host::Backoff backoff;
    Link link{run_->waits(), world_rank(rank)};
    for (int looks = 0;; ++looks) {
      auto const seen = from.changes.load(std::memory_order_relaxed);
      auto const left = from.left.load(std::memory_order_acquire);
      bool const ended = run_->has_ended(world_rank(peer));
      if ((from.*what).load(std::memory_order_acquire) >= value) return;
      if (run_->disagreed()) throw_if_poisoned(rank);
      if (call != 0 && looks > 64) expect_no_circle(link, rank, what, value, call, looks);
      if (left == Published<D>::failed) throw_told(world_rank(rank), world_rank(peer), from.failure);
      if (left == Published<D>::left_by_exception && !ended) await_end(peer);
      if (left != 0 || ended) {
        throw_if_poisoned(rank);
        comm::throw_peer_left(world_rank(rank), operation, world_rank(peer), left == Published<D>::left_by_exception);
      }
      backoff.pause(from.changes, seen, from.sleepers, [&] {
        return formatted("rank {}: waits for rank {} in {}", world_rank(rank), world_rank(peer), operation.describe());
      });
    }
  }

  /// An exception is on its way through a peer's code: gives it time to be reported with its text, unless the peer
  /// catches it.
  [[gnu::cold]] void await_end(int peer) const {
    auto const calls = run_->waits().announced(world_rank(peer));
    auto const lives = [&] {
      return !run_->has_ended(world_rank(peer)) && run_->waits().announced(world_rank(peer)) == calls;
    };
    for (int round = 0; round < 1000 && lives(); ++round) std::this_thread::sleep_for(std::chrono::milliseconds{1});
  }

  void throw_if_poisoned(int rank) const { run_->throw_if_poisoned(world_rank(rank)); }

 private:
  /// A link of the wait-for graph, while a rank waits for others.
  struct Link {
    WaitGraph& waits;
    int rank;
    bool made = false;

    ~Link() {
      if (made) waits.end_wait(rank);
    }
  };

  /// Looks at each member that is yet to join, beginning with another one each time: the last is left for others to
  /// see.
  /// @throws OrderError if one of them waits for `rank`, directly or by way of others
  [[gnu::cold]] void expect_no_circle(Link& link, int rank, Counter what, std::uint64_t value, std::uint64_t call,
                                      int first) {
    for (int step = 0; step < size(); ++step) {
      int const member = (first + step) % size();
      auto const announced = link.waits.announced(world_rank(member));
      if (member == rank || (published(member).*what).load(std::memory_order_acquire) >= value) continue;
      if (published(member).left.load(std::memory_order_acquire) != 0)
        continue;  // whoever waits for it gets a PeerError
      link.made = true;
      auto const circle = link.waits.wait(link.rank, call, world_rank(member), announced);
      if (circle.empty()) continue;
      run_->disagree(link.rank, circle);
      throw_if_poisoned(rank);
    }
  }

  std::shared_ptr<Run<D>> run_;
  std::vector<int> members_;
  fsdp::detail::FixedArray<std::unique_ptr<Published<D>>> published_;
  std::uint64_t id_;
  std::string name_;
  std::atomic<std::uint32_t> entered_{0};
  std::atomic<std::uint32_t> sleepers_{0};
};

/// [Note: Shared by new] std::make_shared takes compilers several times as long as a shared_ptr of what `new` makes. A
/// run, its groups and a rank's communicators are made seldom: they can have an allocation more.
template <class D>
[[gnu::cold]] std::shared_ptr<Group<D>> make_group(std::shared_ptr<Run<D>> const& run, std::vector<int> members,
                                                   std::string_view name) {
  return std::shared_ptr<Group<D>>(new Group<D>(run, std::move(members), name));  // NOLINT(modernize-make-shared)
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::local::detail
