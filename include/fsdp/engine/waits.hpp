// SPDX-License-Identifier: Apache-2.0
// Enqueues the waits that an operation needs, and the events that others wait for.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "fsdp/concepts.hpp"
#include "fsdp/engine/streams.hpp"
#include "fsdp/fixed_array.hpp"
#include "fsdp/step/hazards.hpp"
#include "fsdp/step/program.hpp"
#include "fsdp/wait_site.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail {

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
      return pool == Pool::kept ? WaitSite::gather_kept_slice : WaitSite::gather_slot_read;
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

/// Waits of one rank. An operation is ordered before it is enqueued, and noted after.
template <Communicator C>
class Waits {
 public:
  using D = typename C::Device;
  using Operation = step::Operation;

  Waits(D const& device, Streams<D>& streams, Groups<C>& groups)
      : device_(device), streams_(&streams), groups_(&groups) {}

  /// @param program  must outlive the waits
  [[gnu::cold]] void prepare(Program const& program) {
    hazards_ = step::Hazards(program.buffers, order_among_peers<C>());
    for (std::size_t stream = 0; stream < stream_kinds; ++stream) {
      auto& events = events_[stream] = {};
      // Room for the events of two steps, and for 8 late ones.
      events.points = FixedArray<step::Point>(std::bit_ceil(2 * program.events[stream] + 8));
      while (events.ring.size() < events.points.size()) events.ring.push_back(device_.make_event());
      events.behind = std::vector<std::size_t>(std::bit_ceil(2 * program.noted[stream] + 8));
    }
  }

  /// Sets the flags of the pass in progress. They decide after which operations an event is recorded.
  void set_flags(Facts flags) { flags_ = flags; }
  /// The operation's stream waits for everything that its accesses need.
  void order(Operation const& operation) {
    if (!operation.is_tracked()) return;
    if (auto const needs = hazards_.before(operation); needs.some()) enqueue(operation, needs);
  }
  /// Notes an operation that was enqueued.
  /// @param ticket  of a collective
  void note(Operation const& operation, Ticket ticket = {}) {
    if (!operation.is_noted()) return;
    hazards_.after(operation, ticket.sequence);
    if (operation.is_recorded(flags_)) record(operation.stream);
  }
  /// Notes an operation that an exception has ended; some of it may have been enqueued. Records no event.
  void note_interrupted(Operation const& operation) noexcept {
    if (operation.is_noted()) hazards_.after(operation);
  }
  /// Number of late events: see [Note: Events].
  std::size_t late_records() const { return late_; }

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
  Facts flags_ = plain_step;
  std::size_t late_ = 0;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail
