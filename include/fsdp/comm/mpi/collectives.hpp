// SPDX-License-Identifier: Apache-2.0
// Collectives as run by a stream's worker: shared memory on the node, messages across nodes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "fsdp/comm/common/operation.hpp"
#include "fsdp/comm/mpi/call.hpp"
#include "fsdp/comm/mpi/control.hpp"
#include "fsdp/comm/mpi/group.hpp"
#include "fsdp/comm/mpi/messages.hpp"
#include "fsdp/comm/mpi/placement.hpp"
#include "fsdp/comm/mpi/slices.hpp"
#include "fsdp/comm/mpi/steps.hpp"
#include "fsdp/comm/mpi/tree_sum.hpp"
#include "fsdp/concepts.hpp"
#include "fsdp/failure.hpp"
#include "fsdp/wait_site.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::mpi::detail {

/// Runs the collectives of one communicator. Used by the worker of the communicator's stream alone.
class Collectives : Slices {
 public:
  using Slices::Slices;

  void run(Call const& call) {
    if (group_.size() == 1) return run_alone(call);
    auto const sequence = call.header.sequence;
    awaited_ = {call.header.operation().numbered(sequence, group_.name()), call.header.numbers.own, sequence};
    try {
      group_.throw_if_failed(sequence);
      meet(call);
      switch (call.header.collective) {
        case Collective::all_gather: all_gather(call); break;
        case Collective::reduce_scatter: reduce_scatter(call); break;
        case Collective::all_reduce:
        case Collective::all_reduce_mean: all_reduce(call); break;
        case Collective::broadcast: broadcast(call); break;
      }
    } catch (OrderError const&) {
      abandon();
      throw;  // noted by who found it
    } catch (...) {
      abandon();
      group_.fail_all(current_failure(), sequence);
      throw;
    }
    group_.own().done.publish(sequence);
  }

  /// Tells peers that the call will not run, because its stream has failed.
  void drop(Call const& call, Failure const& why) noexcept {
    if (group_.size() > 1) group_.fail_all(why, call.header.sequence);
  }

  /// Returns when all peers on the node have completed the collective; messages to others leave nothing to wait for.
  void wait_for_peers(Ticket ticket, WaitSite site) {
    if (group_.size() == 1) return;
    Operation const waiting{.call = "wait_for_peers", .label = {{}, fsdp::name(site)}, .communicator = group_.name()};
    Awaited awaited{waiting, 0, ticket.sequence};
    group_.wait_for_node(&RankControl::done, ticket.sequence, awaited);
  }

 private:
  static constexpr std::size_t small_all_reduce = 16 * 1024;  // bytes: every rank sums everything, in one step

  static void run_alone(Call const& call) {
    if (call.header.collective != Collective::broadcast)
      copy(call.receive, call.send, call.header.count * call.element());
  }

  void all_gather(Call const& call) {
    std::size_t const count = call.header.count;
    bool const direct = all([&](Header const& h) { return h.send.direct && (!crosses() || h.receive.direct); });
    gather(call, {count * static_cast<std::size_t>(group_.size()), count}, call.send, direct,
           [&](int peer, std::size_t begin, std::size_t bytes) {
             copy(call.receive + static_cast<std::size_t>(peer) * count * call.element() + begin,
                  group_.address(header(peer).send, peer) + begin, bytes);
           });
    finish(direct);
  }

  void reduce_scatter(Call const& call) {
    std::size_t const count = call.header.count;
    bool const direct = all([](Header const& h) { return h.send.direct; });
    scatter(call, {count * static_cast<std::size_t>(group_.size()), count}, call.receive, direct);
  }

  void all_reduce(Call const& call) {
    std::size_t const count = call.header.count;
    if (count * call.element() <= small_all_reduce) return all_reduce_small(call);
    auto const ranks = static_cast<std::size_t>(group_.size());
    auto const self = static_cast<std::size_t>(group_.rank());
    std::size_t const line = 64 / call.element();
    Parts const parts{count, ((count + ranks - 1) / ranks + line - 1) / line * line};
    bool const direct = all([](Header const& h) { return h.send.direct && h.receive.direct; });
    std::byte* const own = call.receive + parts.begin(self) * call.element();
    scatter(call, parts, own, direct);
    gather(call, parts, own, direct, [](int, std::size_t, std::size_t) {});  // scatter has done it
    if (direct) meet_step([](std::byte*) {});  // all ranks of the node have written here, and read what is here
  }

  /// All ranks sum all elements; of several nodes, only the leaders do.
  void all_reduce_small(Call const& call) {
    std::size_t const bytes = call.header.count * call.element();
    if (bytes == 0) return;
    auto const& places = group_.placement();
    meet_step([&](std::byte* scratch) { copy(scratch, call.send, bytes); });
    for (auto const peer : group_.on_node()) sum_.from[static_cast<std::size_t>(peer)] = staged(peer);
    if (crosses()) {
      if (places.leads()) sum_with_leaders(call);
      meet_step([&](std::byte* scratch) {
        if (places.leads()) copy(scratch, received_.data(), bytes);
      });
      return copy(call.receive, staged(places.leader(places.own_node())), bytes);
    }
    sum_.run(call.header.type, call.takes_mean(), call.receive, call.header.count);
  }
  /// Leaders send each other what their nodes have staged, and leave the sum in received_.
  void sum_with_leaders(Call const& call) {
    auto const& places = group_.placement();
    auto const type = call.header.type;
    std::size_t const count = call.header.count, element = call.element(), wide = size_of(partial_type(type));
    std::size_t const most = count * wide;
    received_.resize(std::max(received_.size(), (1 + places.pieces().size()) * most));
    auto* place = received_.data() + most;  // after the sum's own
    for (auto const& piece : places.pieces()) {
      auto const first = static_cast<std::size_t>(piece.first);
      std::size_t const bytes = count * (piece.ranks > 1 ? wide : element);
      if (piece.node != places.own_node()) {
        messages_.receive(places.leader(piece.node), place, bytes);
        sum_.from[first] = place;
      } else {
        void const* from = sum_.from[first];
        if (piece.ranks > 1) {
          partial_sum(type, sum_.from.data() + first, static_cast<std::size_t>(piece.ranks), place, count);
          from = place;
        }
        for (int node = 0; node < places.nodes(); ++node)
          if (node != places.own_node()) messages_.send(places.leader(node), from, bytes);
      }
      place += most;
    }
    messages_.close_round();
    messages_.wait_all(waiter());
    sum_.run(type, call.takes_mean(), received_.data(), count);
  }

  /// The root sends to one rank of each node, which passes the data on.
  void broadcast(Call const& call) {
    auto const& places = group_.placement();
    int const root = call.header.root, root_node = places.node_of(root);
    int const source = root_node == places.own_node() ? root : places.leader(places.own_node());
    bool const is_source = source == group_.rank();
    std::size_t const bytes = call.header.count * call.element();
    bool const direct = crosses() ? all([](Header const& h) { return h.send.direct; }) : header(root).send.direct;
    std::size_t const chunk = chunk_bytes(direct, group_.control().half());
    for (std::size_t begin = 0; begin < bytes;) {
      std::size_t const length = std::min(chunk, bytes - begin);
      for (int node = 0; node < places.nodes(); ++node)
        if (root == group_.rank() && node != root_node)
          messages_.send(places.leader(node), call.receive + begin, length);
      bool const arrives = root_node != places.own_node();
      if (arrives && is_source) messages_.receive(root, call.receive + begin, length);
      messages_.close_round();
      if (arrives && !is_alone_on_node()) messages_.wait_all(waiter());
      if (!direct || (arrives && !is_alone_on_node()))
        meet_step([&](std::byte* scratch) {
          if (!direct && is_source) copy(scratch, call.receive + begin, length);
        });
      if (!is_source)
        copy(call.receive + begin, direct ? group_.address(header(source).send, source) + begin : staged(source),
             length);
      while (messages_.rounds_in_flight() > 2) messages_.wait_round(waiter());
      begin += length;
    }
    messages_.wait_all(waiter());
    finish(direct);
  }
  /// Carriers' memory, where others' data arrived, is not read any more.
  void finish(bool direct) {
    if (direct && crosses() && !is_alone_on_node()) meet_step([](std::byte*) {});
  }
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::mpi::detail
