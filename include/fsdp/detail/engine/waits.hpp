// SPDX-License-Identifier: Apache-2.0
// The streams of an engine, their failures, the waits that an operation needs, and the events that others wait for.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "fsdp/concepts.hpp"
#include "fsdp/detail/base/fixed_array.hpp"
#include "fsdp/detail/base/streams.hpp"
#include "fsdp/detail/step/hazards.hpp"
#include "fsdp/detail/step/program.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail {

/// Compute may be the caller's stream; the others are the engine's own.
template <Device D>
class Streams {
 public:
  using Stream = typename D::Stream;

  /// @param compute  nullptr: a stream of its own
  [[gnu::cold]] Streams(D const& device, Stream* compute) {
    if (compute == nullptr) compute = &owned_[0].emplace(device.make_stream("compute", StreamPriority::normal));
    streams_[0] = compute;
    add(device, StreamKind::gather);
    add(device, StreamKind::reduce);
  }
  Streams(Streams&&) = delete;

  /// Adds the stream that replicas need.
  [[gnu::cold]] void add_replicate(D const& device) {
    if (streams_[index(StreamKind::replicate)] == nullptr) add(device, StreamKind::replicate);
  }
  /// Adds the copy stream, for offloading.
  [[gnu::cold]] void add_copy(D const& device) {
    if (streams_[index(StreamKind::copy)] == nullptr) add(device, StreamKind::copy);
  }
  /// The stream of a kind; nullptr: there is none.
  Stream* find(StreamKind kind) const { return streams_[index(kind)]; }
  /// @pre the stream exists
  Stream& operator[](StreamKind kind) const { return *streams_[index(kind)]; }
  /// Calls `visit(Stream&)` for each stream.
  template <class Visit>
  void for_each(Visit const& visit) const {
    for (auto const kind :
         {StreamKind::gather, StreamKind::compute, StreamKind::reduce, StreamKind::replicate, StreamKind::copy})
      if (auto* const stream = streams_[index(kind)]; stream != nullptr) visit(*stream);
  }

 private:
  static constexpr std::size_t index(StreamKind kind) { return static_cast<std::size_t>(kind); }
  void add(D const& device, StreamKind kind) {
    streams_[index(kind)] = &owned_[index(kind)].emplace(device.make_stream(name(kind), StreamPriority::high));
  }

  std::array<std::optional<Stream>, stream_kinds> owned_;
  std::array<Stream*, stream_kinds> streams_{};
};

/// Failures of the streams of one rank's engine. Used by its host thread.
template <Device D>
class StreamFailures {
 public:
  using Stream = typename D::Stream;

  explicit StreamFailures(Streams<D> const& streams) : streams_(&streams) {}

  template <class Visit>
  void for_each_stream(Visit const& visit) {
    streams_->for_each(visit);
  }
  /// The stream to report: one that has failed by itself, else one that peers have failed; nullptr: none.
  [[gnu::cold]] Stream* failed_stream() {
    Stream* found = nullptr;
    for_each_stream([&](Stream& stream) {
      auto const* const why = failure_of(stream);
      if (why != nullptr && (found == nullptr || why->kind != ErrorKind::peer)) found = &stream;
    });
    return found;
  }
  /// Checks the streams without waiting.
  /// @throws why one of them has failed: the cause, where there are failures that come of it
  void expect_whole() {
    if constexpr (ReportsFailure<Stream>)
      if (auto const* const failed = failed_stream()) failed->rethrow();
  }

  /// Calls `act`, which waits for peers, or enqueues. Peers may have ended because a stream of this rank has failed,
  /// and this rank hears of them first.
  /// @throws why a stream has failed by itself, in place of a PeerError; else what `act` throws
  template <class Act>
  decltype(auto) with_cause(Act const& act) {
    try {
      return act();
    } catch (PeerError const&) {
      raise_cause();
      throw;
    }
  }
  /// Throws the cause of a PeerError that was caught: see with_cause.
  [[gnu::cold]] void raise_cause() {
    reported_ = true;
    for_each_stream([](Stream const& stream) { raise_own_failure(stream); });
  }
  /// @return whether a call has thrown a stream's or a peer's failure
  bool was_reported() {
    static_assert(
        !requires(Stream const& stream) { stream.was_told(); }, "a stream's was_told() is called was_reported() now");
    bool reported = reported_;
    if constexpr (ReportsFailure<Stream>)
      for_each_stream([&](Stream const& stream) { reported |= stream.was_reported(); });
    return reported;
  }

 private:
  Streams<D> const* streams_;
  bool reported_ = false;  ///< a PeerError was on its way through with_cause
};

/// The name of a wait for an event.
/// @param pool     of the cells that are waited for
/// @param updates  the waiting operation is an optimizer's, or a norm's
constexpr WaitSite event_site(StreamKind waiting, step::Pool pool, bool updates) {
  using step::Pool;
  switch (waiting) {
    case StreamKind::copy: return WaitSite::offload_used;
    case StreamKind::compute:
      if (step::Buffers::is_staged(pool)) return WaitSite::offload_fetched;
      if (pool == Pool::offloaded) return WaitSite::offload_stored;
      if (pool == Pool::gradient && updates) return WaitSite::optimizer_reduced;
      if (pool == Pool::gradient || pool == Pool::gradient_slot) return WaitSite::compute_gradient_slot;
      return WaitSite::compute_unsharded;
    case StreamKind::gather:
      if (pool == Pool::master) return WaitSite::gather_updated;
      return pool == Pool::kept_slice ? WaitSite::gather_kept_slice : WaitSite::gather_slot_read;
    case StreamKind::reduce:
      if (step::Buffers::is_staged(pool)) return WaitSite::offload_fetched;
      if (pool == Pool::partial) return WaitSite::reduce_partial_read;
      return pool == Pool::wire ? WaitSite::reduce_wire_read : WaitSite::reduce_gradients;
    default:
      if (step::Buffers::is_staged(pool)) return WaitSite::offload_fetched;
      return pool == Pool::gradient ? WaitSite::reduce_gradients : WaitSite::replicate_scattered;
  }
}
/// The name of a wait for peers that read an input of a collective.
constexpr WaitSite peers_site(StreamKind waiting, step::Group group) {
  if (group == step::Group::gather || group == step::Group::kept) return WaitSite::gather_peers_read;
  if (group != step::Group::reduce) return WaitSite::replicate_peers_read;
  return waiting == StreamKind::replicate ? WaitSite::replicate_scatter_peers : WaitSite::reduce_peers_read;
}

/// Communicators, by group. Groups that a program does not use have none.
template <Communicator C>
using Groups = std::array<std::optional<C>, step::groups>;

/// Waits of one rank. An operation is ordered before it is enqueued, and remembered after.
template <Communicator C>
class Waits {
 public:
  using D = typename C::Device;
  using Operation = step::Operation;

  Waits(D const& device, Streams<D>& streams, Groups<C>& groups)
      : device_(device), streams_(&streams), groups_(&groups) {}

  /// @param program  must outlive the waits
  [[gnu::cold]] void prepare(Program const& program) {
    bool ordered = true;
    for (auto const& comm : *groups_) ordered = ordered && (!comm || order_among_peers(*comm));
    hazards_ = step::Hazards(program.buffers, ordered);
    for (std::size_t stream = 0; stream < stream_kinds; ++stream) {
      auto& events = events_[stream] = {};
      // Room for the events of two steps, and for 8 late ones.
      events.points = FixedArray<step::Point>(std::bit_ceil(2 * program.events[stream] + 8));
      while (events.ring.size() < events.points.size()) events.ring.push_back(device_.make_event());
      events.behind = std::vector<std::size_t>(std::bit_ceil(2 * program.awaitable[stream] + 8));
    }
  }

  /// Sets the flags of the pass in progress. They decide after which operations an event is recorded.
  void set_flags(StepFlags flags) { flags_ = flags; }
  /// The operation's stream waits for everything that its accesses need.
  void order(Operation const& operation) {
    if (!operation.has_conflicts()) return;
    if (auto const needs = hazards_.before(operation); needs.some()) enqueue(operation, needs);
  }
  /// Remembers an operation that was enqueued.
  /// @param ticket  of a collective
  void remember(Operation const& operation, Ticket ticket = {}) {
    if (!operation.may_be_awaited()) return;
    hazards_.after(operation, ticket.sequence);
    if (operation.is_recorded(flags_)) record(operation.stream);
  }
  /// Remembers an operation that an exception has ended; some of it may have been enqueued. Records no event.
  void remember_interrupted(Operation const& operation) noexcept {
    if (operation.may_be_awaited()) hazards_.after(operation);
  }
  /// Number of late events: see [Note: Events].
  std::size_t late_events() const { return late_; }

 private:
  /// An event, and the point in the run at which it was recorded.
  struct Recorded {
    step::Point* point = nullptr;
    typename D::Event* event = nullptr;
  };
  /// The latest events of a stream, in order. An index into either list is taken modulo its size, so what is found in
  /// place of a lost element comes later.
  struct Events {
    std::vector<typename D::Event> ring;  ///< a power of two
    FixedArray<step::Point> points;       ///< by event
    std::vector<std::size_t> behind;      ///< a power of two; by number of an operation: the first event behind it
    std::size_t recorded = 0;             ///< events so far
    std::uint64_t last = 0;               ///< the last operation before an event
    Recorded at(std::size_t index) {
      auto const place = index & (ring.size() - 1);
      return {&points[place], &ring[place]};
    }
    std::size_t& behind_of(std::uint64_t number) { return behind[number & (behind.size() - 1)]; }
  };

  void record(StreamKind stream) {
    auto& events = events_[static_cast<std::size_t>(stream)];
    auto const next = events.at(events.recorded);
    device_.record(*next.event, (*streams_)[stream]);
    *next.point = hazards_.point(stream);
    for (auto const number = hazards_.number(stream); events.last < number;)
      events.behind_of(++events.last) = events.recorded;
    ++events.recorded;
  }
  /// The first event behind operation `number` of the stream; a later one if the ring has lost that.
  Recorded event_after(StreamKind stream, std::uint64_t number) {
    auto& events = events_[static_cast<std::size_t>(stream)];
    if (number > events.last) {
      record(stream);
      ++late_;
    }
    return events.at(events.behind_of(number));
  }
  [[gnu::noinline]] void enqueue(Operation const& operation, step::Hazards::Needs const& needs) {
    auto& stream = (*streams_)[operation.stream];
    std::array<Recorded, stream_kinds> events;
    step::for_each_bit(needs.streams.bits, [&](std::size_t i) {
      events[i] = event_after(static_cast<StreamKind>(i), needs.streams.numbers[i]);
    });
    bool const updates = operation.primitive == step::Primitive::update || operation.primitive == step::Primitive::norm;
    step::for_each_event(
        needs, [&](StreamKind of) -> step::Point const& { return *events[static_cast<std::size_t>(of)].point; },
        [&](StreamKind of) {
          auto const i = static_cast<std::size_t>(of);
          device_.wait(stream, *events[i].event, event_site(operation.stream, needs.streams.pools[i], updates));
        });
    step::for_each_bit(needs.streams.bits, [&](std::size_t i) { hazards_.learn(operation.stream, *events[i].point); });
    auto const& known = hazards_.point(operation.stream);
    step::for_each_bit(needs.peers.bits, [&](std::size_t i) {
      auto const collective = needs.peers.numbers[i];
      if (collective <= known.peers[i]) return;
      auto const group = static_cast<step::Group>(i);
      (*groups_)[i]->wait_for_peers(stream, Ticket{collective}, peers_site(operation.stream, group));
      hazards_.learn(operation.stream, group, collective);
    });
  }

  D device_;
  Streams<D>* streams_;
  Groups<C>* groups_;
  step::Hazards hazards_;
  std::array<Events, stream_kinds> events_;
  StepFlags flags_ = plain_step;
  std::size_t late_ = 0;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail
