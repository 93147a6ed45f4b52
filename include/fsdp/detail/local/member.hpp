// SPDX-License-Identifier: Apache-2.0
// A rank's membership in a group of a local run: the rendezvous of a collective, and an orderly departure.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/detail/local/group.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::local::detail {

/// Identity of a stream; it stays the same after moves if the device supports that.
template <class Stream>
std::uintptr_t identity(Stream const& stream) {
  if constexpr (requires { stream.id(); }) {
    return reinterpret_cast<std::uintptr_t>(stream.id());
  } else if constexpr (requires { stream.get(); }) {
    return reinterpret_cast<std::uintptr_t>(stream.get());
  } else {
    return reinterpret_cast<std::uintptr_t>(&stream);
  }
}

/// A rank's place in one group. Used by the rank's host thread only.
template <class D>
class Member {
 public:
  using Stream = typename D::Stream;
  using Entry = typename Published<D>::Entry;

  Member(std::shared_ptr<Group<D>> group, int rank, D const& device)
      : group_(std::move(group)), rank_(rank), device_(device), unwinding_(std::uncaught_exceptions()) {
    group_->enter(rank_, device_);
  }

  int rank() const { return rank_; }
  int size() const { return group_->size(); }
  int world_rank() const { return group_->world_rank(rank_); }  ///< in the run, for messages
  D const& device() const { return device_; }
  Group<D>& group() const { return *group_; }
  void report_history(int engine, std::string_view history) const noexcept {
    group_->run().ends(world_rank()).add(group_->id(), engine, history);
  }

  /// Runs a collective: publishes it, waits until every peer has published the same, and calls `enqueue(sequence)`. If
  /// anything of that fails, the peers are told why.
  /// @throws OrderError, PeerError, UsageError (a second stream), and what the device throws
  template <class Enqueue>
  Ticket collective(Stream& stream, Request const& request, Enqueue const& enqueue) {
    bind(stream, request);
    auto const sequence = ++sequence_;
    try {
      if (size() > 1) meet(stream, request, sequence);
      enqueue(sequence);
      if (size() > 1) {
        device_.record(published().entry(sequence).done, stream);
        published().announce(published().done, sequence);
      }
    } catch (PeerError const&) {
      fail_peers();
      raise_own_failure(stream);
      throw;
    } catch (std::exception const&) {
      if (size() > 1) fail_peers();
      throw;
    }
    return Ticket{sequence};
  }

  /// The record that a peer has published about a collective that has begun.
  Entry const& peer_entry(int peer, std::uint64_t sequence) const { return group_->published(peer).entry(sequence); }

  void publish_partial(Stream& stream, std::uint64_t sequence) {
    device_.record(published().entry(sequence).partial, stream);
    published().announce(published().partial, sequence);
  }
  Entry const& await_partial(int peer, std::uint64_t sequence) const {
    await(peer, &Published<D>::partial, sequence, 0);
    return peer_entry(peer, sequence);
  }

  [[gnu::noinline]] void wait_for_peers(Stream& stream, Ticket ticket, WaitSite site) const {
    FSDP_EXPECTS(ticket.sequence <= sequence_,
                 "rank {}: wait_for_peers: the ticket is for collective {}, but this communicator has enqueued only {}",
                 world_rank(), ticket.sequence, sequence_);
    if (size() == 1 || ticket.sequence == 0) return;
    // The latest collective that has used the ticket's entry: see [Note: Reuse of published entries].
    auto const latest = sequence_ - (sequence_ - ticket.sequence) % Published<D>::depth;
    try {
      for_peers([&](int peer) {
        await(peer, &Published<D>::done, latest, 0);
        device_.wait(stream, peer_entry(peer, latest).done, site);
      });
    } catch (PeerError const&) {
      raise_own_failure(stream);
      throw;
    }
  }

  [[gnu::cold]] std::vector<std::string> exchange(std::string text, std::string_view what) {
    auto const number = ++exchanges_;
    // A text is overwritten two exchanges later: by then every peer has published the next, thus read this one.
    published().texts[number % 2] = std::move(text);
    published().whats[number % 2].assign(what);
    auto const call = group_->announce_call(rank_, group_->note_of_exchange(what), published().exchanged, number);
    std::vector<std::string> texts(static_cast<std::size_t>(size()));
    texts[static_cast<std::size_t>(rank_)] = published().texts[number % 2];
    auto const operation = CallDescription::exchange(what, group_->name());
    for_peers([&](int peer) {
      auto& from = group_->published(peer);
      group_->await(rank_, peer, &Published<D>::exchanged, number, call, operation);
      texts[static_cast<std::size_t>(peer)] = from.texts[number % 2];
    });
    comm::expect_same_exchange(
        rank_, size(), [&](int rank) -> Text const& { return group_->published(rank).whats[number % 2]; },
        [&](int rank) { return group_->world_rank(rank); });
    return texts;
  }

  /// Lets `stream` wait for all that peers do with this rank's buffers. False if a collective or the run has failed.
  bool drain(Stream& stream) const {
    if (broken_ || group_->run().poisoned()) return false;
    wait_for_peers(stream, Ticket{sequence_}, WaitSite::none);
    return true;
  }
  bool needs_drain() const { return size() > 1 && drained_ < sequence_; }
  void drained() { drained_ = sequence_; }
  bool has_left() const { return left_; }

  /// Peers that wait for more from this rank get a PeerError.
  /// @param cause  of the rank's end, for them; nullptr: none is known
  void leave(Failure const* cause) noexcept {
    left_ = true;
    if (broken_) return;  // they know already
    auto how = unwinding() ? Published<D>::left_by_exception : Published<D>::left_in_order;
    if (cause != nullptr) {
      try {
        published().failure = *cause;
        how = Published<D>::failed;
      } catch (std::exception const&) {  // no memory for the text: peers learn that this rank has left
      }
    }
    published().announce(published().left, how);
  }
  bool unwinding() const { return std::uncaught_exceptions() > unwinding_; }

  /// Lets kernels of this rank's device read memory of peers' devices, where devices have to be told.
  /// @throws what the device throws where it cannot
  [[gnu::cold]] void enable_peer_access() const {
    if constexpr (requires { device_.enable_peer_access(device_); })
      for_peers([&](int peer) { device_.enable_peer_access(group_->published(peer).device); });
  }

  /// Peers in rotating order, so that ranks do not all read the same peer first.
  template <class Visit>
  void for_peers(Visit const& visit) const {
    for (int step = 1; step < size(); ++step) visit((rank_ + step) % size());
  }

 private:
  void meet(Stream& stream, Request const& request, std::uint64_t sequence) {
    auto& own = published().entry(sequence);
    own.request = request;
    device_.record(own.ready, stream);
    auto const call = group_->announce_call(rank_, group_->note_of(request), published().published, sequence);
    for_peers([&](int peer) { await(peer, &Published<D>::published, sequence, call); });
    for_peers([&](int peer) { check(request, peer, sequence); });
  }
  /// Tells peers that this rank has failed. @pre called in a catch block
  [[gnu::cold]] void fail_peers() {
    if (std::exchange(broken_, true)) return;
    published().failure = current_failure();
    published().announce(published().left, Published<D>::failed);
  }

  Published<D>& published() const { return group_->published(rank_); }

  void bind(Stream const& stream, Request const& request) {
    auto const id = identity(stream);
    if (stream_ == 0) stream_ = id;
    FSDP_EXPECTS(!broken_,
                 "rank {}: {}: an earlier collective of this communicator has failed, so the communicator cannot be "
                 "used any more",
                 world_rank(), request.operation().describe());
    comm::expect_bound_stream(world_rank(), request.operation(), stream_ == id);
  }
  [[gnu::noinline]] void await(int peer, std::atomic<std::uint64_t> Published<D>::*what, std::uint64_t sequence,
                               std::uint64_t call) const {
    auto const operation = published().entry(sequence).request.operation();
    group_->await(rank_, peer, what, sequence, call, operation.numbered(sequence, group_->name()));
  }
  void check(Request const& request, int peer, std::uint64_t sequence) const {
    auto const& theirs = peer_entry(peer, sequence).request;
    if (!request.agrees(theirs)) refuse(request, peer, theirs, sequence);
  }
  [[noreturn, gnu::cold, gnu::noinline]] void refuse(Request const& request, int peer, Request const& theirs,
                                                     std::uint64_t sequence) const {
    fail<OrderError>("rank {}: {}", world_rank(),
                     comm::disagreement_text(sequence, world_rank(), request.operation(), group_->world_rank(peer),
                                             theirs.operation()));
  }

  std::shared_ptr<Group<D>> group_;
  int rank_;
  D device_;
  int unwinding_;  // exceptions in flight when the rank sat down
  std::uintptr_t stream_ = 0;
  std::uint64_t sequence_ = 0;  // collectives enqueued
  std::uint64_t exchanges_ = 0;
  std::uint64_t drained_ = 0;  // collectives that peers are known to have finished
  bool left_ = false;
  bool broken_ = false;  // a collective has failed
};

/// State that a rank's communicators share: the device, and all groups in which peers may read this rank's memory.
template <class D>
struct RankGroups {
  explicit RankGroups(D const& on) : device(on) {}

  Member<D>& join(std::shared_ptr<Group<D>> group, int rank) {
    members.push_back(std::make_unique<Member<D>>(std::move(group), rank, device));
    return *members.back();
  }

  /// Frees memory that collectives of this rank may have used.
  [[gnu::cold]] void release(Run<D>& run, void* memory, std::size_t bytes) noexcept {
    if (memory == nullptr) return;
    bool quiet = false;
    try {
      quiet = drain(run);
    } catch (...) {  // a failed run: nobody knows what peers still read
    }
    if (quiet) {
      device.deallocate(memory, bytes);
      return;
    }
    try {
      run.abandon(device, memory, bytes);
    } catch (...) {  // no memory to remember the memory: it stays
    }
  }

  D device;
  std::vector<std::unique_ptr<Member<D>>> members;
  std::optional<Failure> cause;  ///< why this rank will end: a stream of it has failed

 private:
  [[gnu::cold]] bool drain(Run<D>& run) {
    if (run.poisoned() || members.front()->unwinding()) return false;
    bool needed = false;
    for (auto const& member : members) needed = needed || member->needs_drain();
    if (needed) {
      auto stream = device.make_stream("drain", StreamPriority::normal);
      for (auto const& member : members) {
        if (member->needs_drain() && !member->drain(stream)) return false;
      }
      device.synchronize(stream);
      for (auto const& member : members) member->drained();
    }
    // Groups that were left are kept only as long as peers may read through them.
    for (std::size_t i = members.size(); i-- > 1;) {
      if (members[i]->has_left()) members.erase(members.begin() + static_cast<std::ptrdiff_t>(i));
    }
    return true;
  }
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::local::detail
