// SPDX-License-Identifier: Apache-2.0
// Gathers and sums slices of ranks. Each slice crosses to a node once.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "fsdp/comm/common/operation.hpp"
#include "fsdp/comm/mpi/call.hpp"
#include "fsdp/comm/mpi/control.hpp"
#include "fsdp/comm/mpi/group.hpp"
#include "fsdp/comm/mpi/messages.hpp"
#include "fsdp/comm/mpi/placement.hpp"
#include "fsdp/comm/mpi/steps.hpp"
#include "fsdp/comm/mpi/tree_sum.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::mpi::detail {

/// The two data movements of gathers and reductions. Used by the worker of the communicator's stream alone.
class Slices : protected Steps {
 public:
  explicit Slices(Group& group) : Steps(group), sum_(group.placement()) {}

 protected:
  /// Each rank's part of `call.receive` travels to all others. `fetch(peer, begin, bytes)` moves a neighbour's where
  /// none is staged.
  template <class Fetch>
  void gather(Call const& call, Parts parts, std::byte const* own, bool direct, Fetch&& fetch) {
    auto const& places = group_.placement();
    std::size_t const element = call.element();
    std::byte* const to = call.receive;
    // Staged are this rank's part and those that it carries.
    std::size_t const slot = group_.control().half() / (1 + places.most_carried()) / 64 * 64;
    std::size_t const chunk = chunk_bytes(direct, slot) / element;
    auto const offset = [&](int rank, std::size_t begin) {
      return (parts.begin(static_cast<std::size_t>(rank)) + begin) * element;
    };
    auto const bytes = [&](int rank, std::size_t begin) {
      return parts.length(static_cast<std::size_t>(rank), begin, chunk) * element;
    };
    auto const post = [&](std::size_t begin) {
      for (int node = 0; node < places.nodes(); ++node)
        if (node != places.own_node())
          messages_.send(places.carrier(node, group_.rank()), own + begin * element, bytes(group_.rank(), begin));
      for (auto const rank : places.carried()) messages_.receive(rank, to + offset(rank, begin), bytes(rank, begin));
      messages_.close_round();
    };
    auto const take_neighbours = [&](std::size_t begin) {
      for_each_neighbour([&](int peer) {
        if (bytes(peer, begin) == 0) return;
        if (direct) return fetch(peer, begin * element, bytes(peer, begin));
        copy(to + offset(peer, begin), staged(peer), bytes(peer, begin));
      });
      copy(to + offset(group_.rank(), begin), own + begin * element, bytes(group_.rank(), begin));
    };
    auto const stage = [&](std::byte* scratch, std::size_t begin) {
      if (direct) return;
      copy(scratch, own + begin * element, bytes(group_.rank(), begin));
      for (auto const rank : places.carried())
        copy(scratch + (1 + places.slot(rank)) * slot, to + offset(rank, begin), bytes(rank, begin));
    };
    auto const take_carried = [&](std::size_t begin) {
      for (auto const rank : group_.elsewhere()) {
        int const carrier = places.carrier(places.own_node(), rank);
        if (carrier == group_.rank() || bytes(rank, begin) == 0) continue;
        copy(to + offset(rank, begin),
             direct ? group_.address(header(carrier).receive, carrier) + offset(rank, begin)
                    : staged(carrier) + (1 + places.slot(rank)) * slot,
             bytes(rank, begin));
      }
    };
    if (parts.part > 0) post(0);
    for (std::size_t begin = 0; begin < parts.part;) {
      std::size_t const next = begin + std::min(chunk, parts.part - begin);
      if (next < parts.part) post(next);
      if (direct) take_neighbours(begin);
      if (direct && is_alone_on_node()) {
        while (messages_.rounds_in_flight() > 2) messages_.wait_round(waiter());
      } else {
        messages_.wait_round(waiter());
        if (!direct || crosses()) meet_step([&](std::byte* scratch) { stage(scratch, begin); });
        if (!direct) take_neighbours(begin);
        take_carried(begin);
      }
      begin = next;
    }
    messages_.wait_all(waiter());
  }

  /// Sums this rank's part over all ranks into `to`. Where an all_reduce reads peers' memory, it writes the sum there
  /// as well.
  void scatter(Call const& call, Parts parts, std::byte* to, bool direct) {
    using Piece = Placement::Piece;
    auto const& places = group_.placement();
    auto const type = call.header.type;
    std::size_t const element = call.element(), wide = size_of(partial_type(type));
    auto const ranks = static_cast<std::size_t>(group_.size());
    std::size_t const slot = group_.control().half() / ranks / 64 * 64;  // of one rank in the scratch
    std::size_t const chunk = chunk_bytes(direct, slot) / (crosses() ? wide : element);
    std::size_t const most = std::min(chunk, parts.part) * wide;  // bytes of a chunk
    auto const is_partial = [&](Piece const& piece) { return piece.ranks > 1; };
    auto const is_own = [&](Piece const& piece) { return piece.node == places.own_node(); };
    auto const offset = [&](int rank, std::size_t begin) {
      return (parts.begin(static_cast<std::size_t>(rank)) + begin) * element;
    };
    auto const length = [&](int rank, std::size_t begin) {
      return parts.length(static_cast<std::size_t>(rank), begin, chunk);
    };
    // Two chunks of each are under way.
    std::size_t const arriving = static_cast<std::size_t>(
        std::count_if(places.pieces().begin(), places.pieces().end(), [&](Piece const& p) { return !is_own(p); }));
    std::size_t const leaving =
        places.carried().size() *
        static_cast<std::size_t>(std::count_if(places.pieces().begin(), places.pieces().end(),
                                               [&](Piece const& p) { return is_own(p) && is_partial(p); }));
    received_.resize(std::max(received_.size(), 2 * arriving * most));
    partial_.resize(std::max(partial_.size(), 2 * leaving * most));
    auto const half = [&](std::size_t begin) { return begin / chunk % 2; };
    // The data of `peer`, a rank of this node, for `rank`.
    auto const data = [&](int peer, int rank, std::size_t begin) -> std::byte const* {
      if (peer == group_.rank()) return call.send + offset(rank, begin);
      if (direct) return group_.address(header(peer).send, peer) + offset(rank, begin);
      return staged(peer) + static_cast<std::size_t>(rank) * slot;
    };
    auto const send_partial = [&](Piece const& piece, int rank, std::byte* buffer, std::size_t begin) {
      if (length(rank, begin) == 0) return;
      sources_.clear();
      for (int peer = piece.first; peer < piece.first + piece.ranks; ++peer)
        sources_.push_back(data(peer, rank, begin));
      partial_sum(type, sources_.data(), sources_.size(), buffer, length(rank, begin));
      messages_.send(rank, buffer, length(rank, begin) * wide);
    };
    auto const post = [&](std::size_t begin) {
      auto* arrives = received_.data() + half(begin) * arriving * most;
      auto* leaves = partial_.data() + half(begin) * leaving * most;
      for (auto const& piece : places.pieces()) {
        if (is_own(piece)) continue;
        int const from = is_partial(piece) ? places.carrier(piece.node, group_.rank()) : piece.first;
        messages_.receive(from, arrives, length(group_.rank(), begin) * (is_partial(piece) ? wide : element));
        arrives += most;
      }
      for (auto const& piece : places.pieces()) {
        if (!is_own(piece)) continue;
        if (is_partial(piece)) {
          for (auto const rank : places.carried()) {
            send_partial(piece, rank, leaves, begin);
            leaves += most;
          }
        } else if (piece.first == group_.rank()) {
          for (auto const rank : group_.elsewhere())
            messages_.send(rank, call.send + offset(rank, begin), length(rank, begin) * element);
        }
      }
      messages_.close_round();
    };
    auto const stage = [&](std::byte* scratch, std::size_t begin) {
      if (is_alone_on_node()) return;
      for (int rank = 0; rank < group_.size(); ++rank)
        if (rank != group_.rank())
          copy(scratch + static_cast<std::size_t>(rank) * slot, call.send + offset(rank, begin),
               length(rank, begin) * element);
    };
    auto const sum_own = [&](std::size_t begin) {
      std::size_t const count = length(group_.rank(), begin);
      if (count == 0) return;
      auto* arrived = received_.data() + half(begin) * arriving * most;
      for (auto const& piece : places.pieces()) {
        if (is_own(piece)) continue;
        sum_.from[static_cast<std::size_t>(piece.first)] = arrived;
        arrived += most;
      }
      for (auto const peer : group_.on_node())
        sum_.from[static_cast<std::size_t>(peer)] = data(peer, group_.rank(), begin);
      if (direct && call.header.collective != Collective::reduce_scatter)
        for_each_neighbour([&](int peer) {
          sum_.to.push_back(group_.address(header(peer).receive, peer) + offset(group_.rank(), begin));
        });
      sum_.run(type, call.takes_mean(), to + begin * element, count);
    };
    if (direct && parts.part > 0) post(0);
    for (std::size_t begin = 0; begin < parts.part;) {
      std::size_t const next = begin + std::min(chunk, parts.part - begin);
      if (!direct) {
        meet_step([&](std::byte* scratch) { stage(scratch, begin); });
        post(begin);
      } else if (next < parts.part) {
        post(next);
      }
      messages_.wait_round(waiter());
      sum_own(begin);
      begin = next;
    }
    messages_.wait_all(waiter());
  }

  TreeSum sum_;  // the running one

 private:
  std::vector<void const*> sources_;  // of a partial sum
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::mpi::detail
