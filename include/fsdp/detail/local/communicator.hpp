// SPDX-License-Identifier: Apache-2.0
// The communicator of ranks that are threads of one process, over any device.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/concepts.hpp"
#include "fsdp/detail/comm/messages.hpp"
#include "fsdp/detail/comm/pairwise.hpp"
#include "fsdp/detail/kernels/elementwise.hpp"
#include "fsdp/detail/local/group.hpp"
#include "fsdp/detail/local/member.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::local {

/// Model of fsdp::Communicator for ranks that are threads of one process.
///
/// Collectives are device copies, and kernels that sum peers' buffers, ordered by events. Enqueueing collective k waits
/// until every peer has enqueued its k, never for device work: `stream wait` on a peer's event needs the event to be
/// recorded, and what ranks disagree about (operation, count, type, unit, root) becomes an OrderError on every rank.
///
/// A rank that fails ends the collectives that it does not join any more, and no earlier ones: the calls of its peers
/// throw a PeerError that names it. Where streams can fail, a collective on a stream that has failed passes the failure
/// on: the peers' streams fail when they come to that collective. A collective of 0 elements moves nothing, and fails
/// the same way.
/// Sums run in the fixed pairwise tree over ranks (pairwise.hpp): results repeat bitwise and are equal on all ranks.
template <fsdp::Device D>
class Communicator {
 public:
  using Device = D;
  using Stream = typename D::Stream;
  static constexpr std::string_view name = "local";

  /// Used by run(): takes `rank`'s place in the group of all ranks.
  /// @throws ConfigError if ranks are on devices that cannot read each other's memory
  /// @note Collective: yes
  Communicator(std::shared_ptr<detail::Group<D>> group, int rank, D const& device)
      : rank_groups_(new detail::RankGroups<D>(device)),  // see [Note: Shared by new]
        member_(&rank_groups_->join(std::move(group), rank)) {
    member_->group().run().add_device(device);
    member_->enable_peer_access();
  }

  Communicator(Communicator&&) noexcept = default;
  Communicator& operator=(Communicator&& other) noexcept {
    if (this == &other) return *this;
    leave();
    rank_groups_ = std::move(other.rank_groups_);
    member_ = other.member_;
    return *this;
  }
  /// Peers that still wait for this rank get a PeerError. A communicator that was moved from can be destroyed, assigned
  /// to, and nothing else: calls throw a UsageError.
  [[gnu::cold, gnu::noinline]] ~Communicator() { leave(); }

  int rank() const { return member().rank(); }
  int size() const { return member().size(); }
  D const& device() const { return member().device(); }

  /// Groups the ranks that pass the same color, numbered by key, then by rank.
  /// @param what the name of the new groups, for messages: equal on all ranks
  /// @throws OrderError on every rank if some do something else
  /// @note Collective: yes; blocks
  [[gnu::cold]] Communicator split(int color, int key, std::string_view what);

  /// Device memory.
  /// @throws ResourceError
  void* allocate(std::size_t bytes) { return device().allocate(bytes); }
  /// Returns memory, after peers have finished the collectives that this rank has enqueued and that may read it.
  /// After a failure in the run the memory is kept until all ranks are gone.
  /// @note Collective: no; may block until the device work of peers' enqueued collectives is done
  void deallocate(void* memory, std::size_t bytes) noexcept;

  /// Every rank's `count` elements, in rank order, to every rank. In place: `send == recv + rank() * count`.
  template <class T>
  Ticket all_gather(Stream& stream, T const* send, T* recv, std::size_t count, Label label) {
    return run(stream, {comm::Collective::all_gather, dtype_of<T>, count, 0, false, send, recv}, label);
  }

  /// Slice r of the sum over ranks of `send` (size() * count elements) to rank r. In place: `recv == send + rank() *
  /// count`.
  template <class T>
  Ticket reduce_scatter(Stream& stream, T const* send, T* recv, std::size_t count, Label label) {
    return run(stream, {comm::Collective::reduce_scatter, dtype_of<T>, count, 0, false, send, recv}, label,
               launch_sum<T>);
  }

  /// The sum over ranks of `count` elements, to every rank. In place: `send == recv`.
  ///
  /// In place, each rank sums one segment of all inputs and copies the others' segments. Out of place, each rank sums
  /// everything into `recv`, because peers may still read a rank's input, but never its result, after its collective.
  template <class T>
  Ticket all_reduce(Stream& stream, T const* send, T* recv, std::size_t count, Label label) {
    return run(stream, {comm::Collective::all_reduce, dtype_of<T>, count, 0, send == recv, send, recv}, label,
               launch_sum<T>);
  }

  /// The mean over ranks: of each element, the sum that all_reduce gives, times 1.0f / size(). In place, each rank
  /// multiplies one segment.
  Ticket all_reduce_mean(Stream& stream, float const* send, float* recv, std::size_t count, Label label) {
    return run(stream, {comm::Collective::all_reduce_mean, DType::f32, count, 0, send == recv, send, recv}, label,
               launch_mean);
  }

  /// `count` elements of rank `root` to every rank, in place.
  /// @throws UsageError if there is no rank `root`
  template <class T>
  Ticket broadcast(Stream& stream, T* data, std::size_t count, int root, Label label) {
    return run(stream, {comm::Collective::broadcast, dtype_of<T>, count, root, false, data, data}, label);
  }

  /// Later work of `stream` waits until every peer has finished its part of the collective, so that this rank's input
  /// may be overwritten. Any stream of the device. With a ticket more than 15 collectives old, waits for a later one.
  /// @note Stream: the host waits until peers have enqueued the collective, the stream for their work
  void wait_for_peers(Stream& stream, Ticket ticket, WaitSite site);

  /// A stream of this rank has failed. Peers that wait for this rank are told why, when this communicator ends or one
  /// that was split from the same world. The first call counts.
  /// @note Collective: no
  [[gnu::cold]] void note_failure(Failure const& why) noexcept;
  /// A stream of this rank has failed, and no call has thrown that: run() throws it when the rank has returned.
  /// @note Collective: no
  [[gnu::cold]] void defer_failure(Failure const& why) noexcept {
    if (rank_groups_ != nullptr) member_->group().run().leave(member_->world_rank(), why);
  }

  /// Every rank's text, in rank order.
  /// @param what the texts are, in a word or two: equal on all ranks
  /// @throws OrderError on every rank if their `what` differ
  /// @note Collective: yes; blocks
  std::vector<std::string> exchange(std::string text, std::string_view what);

  /// Records an engine's last event; see ReportsHistory: run() compares what ranks' engines did last.
  void report_history(int engine, std::string_view history) noexcept {
    if (rank_groups_ != nullptr) member_->report_history(engine, history);
  }

 private:
  Communicator(std::shared_ptr<detail::RankGroups<D>> rank_groups, detail::Member<D>* member)
      : rank_groups_(std::move(rank_groups)), member_(member) {}

  void leave() noexcept {
    if (rank_groups_ != nullptr) member_->leave(rank_groups_->cause ? &*rank_groups_->cause : nullptr);
  }

  detail::Member<D>& member() const {
    FSDP_EXPECTS(rank_groups_ != nullptr, "this communicator was moved from; call the object to which it was moved");
    return *member_;
  }

  /// pairwise::launch_sum for elements of one type. Nothing else of a collective depends on what its elements are.
  using LaunchSum = void (*)(D const&, Stream&, void const* const* from, int ranks, void* to, std::int64_t count);
  template <class T>
  static void launch_sum(D const& device, Stream& stream, void const* const* from, int ranks, void* to,
                         std::int64_t count) {
    pairwise::launch_sum(device, stream, from, ranks, static_cast<T*>(to), count);
  }
  static void launch_mean(D const& device, Stream& stream, void const* const* from, int ranks, void* to,
                          std::int64_t count) {
    launch_sum<float>(device, stream, from, ranks, to, count);
    kernels::scale(device, stream, static_cast<float*>(to), count, kernels::mean_factor(ranks));
  }

  /// @param sum  of a reduction's elements
  [[gnu::noinline]] Ticket run(Stream& stream, detail::Transfer const& transfer, Label label, LaunchSum sum = nullptr);

  void gather_from_all(Stream& stream, std::uint64_t sequence, detail::Request const& request) {
    auto const bytes = request.bytes(request.count);
    auto* const all = static_cast<std::byte*>(request.recv);
    copy(stream, all + static_cast<std::size_t>(rank()) * bytes, request.send, bytes);
    member_->for_peers([&](int peer) {
      auto const* const input = await_input(stream, sequence, peer);
      copy(stream, all + static_cast<std::size_t>(peer) * bytes, input, bytes);
    });
  }

  void all_reduce_in_place(Stream& stream, std::uint64_t sequence, detail::Request const& request, LaunchSum sum) {
    auto* const data = static_cast<std::byte*>(request.recv);
    auto const [first, last] = segment(rank(), request.count);
    sum_inputs(stream, sequence, request, sum, first, data + request.bytes(first), last - first);
    member_->publish_partial(stream, sequence);
    member_->for_peers([&](int peer) {
      auto const& entry = member_->await_partial(peer, sequence);
      auto const [begin, end] = segment(peer, request.count);
      if (begin == end) return;
      device().wait(stream, entry.partial, WaitSite::collective_peer_partial);
      auto const* const theirs = static_cast<std::byte const*>(entry.request.recv);
      copy(stream, data + request.bytes(begin), theirs + request.bytes(begin), request.bytes(end - begin));
    });
  }

  /// The `count` elements from `first` on of every rank's input, summed into `to`.
  void sum_inputs(Stream& stream, std::uint64_t sequence, detail::Request const& request, LaunchSum sum,
                  std::size_t first, void* to, std::size_t count) {
    std::array<void const*, pairwise::max_ranks> from{};
    auto const at_first = [&](void const* input) {
      return static_cast<std::byte const*>(input) + request.bytes(first);
    };
    auto const* const own = from[static_cast<std::size_t>(rank())] = at_first(request.send);
    member_->for_peers(
        [&](int peer) { from[static_cast<std::size_t>(peer)] = at_first(await_input(stream, sequence, peer)); });
    if (count == 0) return;
    if (size() == 1) return copy(stream, to, own, request.bytes(count));
    sum(device(), stream, from.data(), size(), to, static_cast<std::int64_t>(count));
  }

  /// @return what `peer` sends, which later work of the stream finds complete
  void const* await_input(Stream& stream, std::uint64_t sequence, int peer) {
    auto const& entry = member_->peer_entry(peer, sequence);
    device().wait(stream, entry.ready, WaitSite::collective_peer_ready);
    return entry.request.send;
  }
  void copy(Stream& stream, void* to, void const* from, std::size_t bytes) {
    if (to != from) device().copy_async(stream, to, from, bytes);
  }

  /// The segment [first, second) of an all-reduce that `owner` sums: equal shares in multiples of 64 elements.
  std::pair<std::size_t, std::size_t> segment(int owner, std::size_t count) const {
    auto const ranks = static_cast<std::size_t>(size());
    auto const index = static_cast<std::size_t>(owner);
    std::size_t const share = ((count + ranks - 1) / ranks + 63) / 64 * 64;
    return {std::min(count, index * share), std::min(count, (index + 1) * share)};
  }

  std::shared_ptr<detail::RankGroups<D>> rank_groups_;  // nullptr: moved from
  detail::Member<D>* member_;                           // one of its
};

template <fsdp::Device D>
Communicator<D> Communicator<D>::split(int color, int key, std::string_view what) {
  auto const label = comm::split_of(what);
  auto const requests = exchange(formatted("{} {}", color, key), label);
  auto const members = detail::members_of(requests, color);
  int const founder = members.front();
  auto& group = member().group();
  if (rank() == founder) {
    std::vector<int> world;
    for (auto const& member : members) world.push_back(group.world_rank(member));
    group.published(rank()).child = detail::make_group(group.shared_run(), std::move(world), what);
  }
  exchange("founded", label);
  auto child = group.published(founder).child;
  exchange("joined", label);
  if (rank() == founder) group.published(rank()).child.reset();
  int mine = 0;
  while (members[static_cast<std::size_t>(mine)] != rank()) ++mine;
  return Communicator(rank_groups_, &rank_groups_->join(std::move(child), mine));
}

template <fsdp::Device D>
void Communicator<D>::deallocate(void* memory, std::size_t bytes) noexcept {
  if (rank_groups_ != nullptr) rank_groups_->release(member_->group().run(), memory, bytes);
}

template <fsdp::Device D>
void Communicator<D>::wait_for_peers(Stream& stream, Ticket ticket, WaitSite site) {
  member().wait_for_peers(stream, ticket, site);
}

template <fsdp::Device D>
void Communicator<D>::note_failure(Failure const& why) noexcept {
  if (rank_groups_ == nullptr || rank_groups_->cause) return;
  try {
    rank_groups_->cause = why;
  } catch (std::exception const&) {  // no memory for the text: peers learn that this rank has left
  }
}

template <fsdp::Device D>
std::vector<std::string> Communicator<D>::exchange(std::string text, std::string_view what) {
  return member().exchange(std::move(text), what);
}

template <fsdp::Device D>
Ticket Communicator<D>::run(Stream& stream, detail::Transfer const& transfer, Label label, LaunchSum sum) {
  auto const operation =
      comm::CallDescription::collective(transfer.collective, transfer.count, transfer.dtype, transfer.root, label);
  if (transfer.collective == comm::Collective::broadcast) comm::expect_root(member().world_rank(), size(), operation);
  comm::expect_buffers(member().world_rank(), operation, transfer.send, transfer.recv);
  detail::Request const request(transfer, label);
  return member().collective(stream, request, [&](std::uint64_t sequence) {
    if (request.count == 0) return member_->for_peers([&](int peer) { await_input(stream, sequence, peer); });
    switch (request.collective) {
      case comm::Collective::all_gather: return gather_from_all(stream, sequence, request);
      case comm::Collective::reduce_scatter:
        return sum_inputs(stream, sequence, request, sum, static_cast<std::size_t>(rank()) * request.count,
                          request.recv, request.count);
      case comm::Collective::all_reduce:
      case comm::Collective::all_reduce_mean:
        if (request.in_place && size() > 1) return all_reduce_in_place(stream, sequence, request, sum);
        return sum_inputs(stream, sequence, request, sum, 0, request.recv, request.count);
      case comm::Collective::broadcast:
        if (rank() == request.root) return;
        auto const* const input = await_input(stream, sequence, request.root);
        return copy(stream, request.recv, input, request.bytes(request.count));
    }
  });
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::local
