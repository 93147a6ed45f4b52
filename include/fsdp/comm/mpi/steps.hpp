// SPDX-License-Identifier: Apache-2.0
// Steps of all collectives: ranks meet, compare their calls, and move data together.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "fsdp/comm/common/operation.hpp"
#include "fsdp/comm/mpi/call.hpp"
#include "fsdp/comm/mpi/control.hpp"
#include "fsdp/comm/mpi/group.hpp"
#include "fsdp/comm/mpi/messages.hpp"
#include "fsdp/comm/mpi/placement.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::mpi::detail {

/// The collective in progress of one communicator. Used by the worker of the communicator's stream alone.
///
/// [Note: Direct or staged] Where all inputs lie in shared memory, ranks read them in place, in one pass. If any rank's
/// input lies elsewhere, all ranks copy theirs through scratch in shared memory, in steps of half the scratch area,
/// while the other half is still being read. All ranks see all headers, so all take the same path. Between nodes, data
/// pass from carrier to carrier ([Note: One crossing a node]); a carrier's memory, where data arrive, is read by the
/// ranks of its node before the collective ends.
class Steps {
 public:
  explicit Steps(Group& group)
      : group_(group), messages_(group.comm()), headers_(static_cast<std::size_t>(group.size())) {}

 protected:
  static void copy(void* to, void const* from, std::size_t bytes) {
    if (bytes != 0 && to != from) std::memcpy(to, from, bytes);
  }
  auto waiter() {
    return [this](auto&& done, auto&& pause, auto&& missing) {
      wait_until(
          group_.own_world_rank(), awaited_.operation, group_.options().timeout,
          [&] {
            if (done()) return true;
            group_.throw_if_failed(awaited_.collectives);
            return false;
          },
          [&] {
            group_.look_around(awaited_);
            pause();
          },
          [&] {
            std::vector<int> ranks;
            for (auto const rank : missing()) ranks.push_back(group_.world_rank_of(rank));
            return awaited_.meets ? group_.absent(awaited_, std::move(ranks)) : ranks;
          });
    };
  }

  /// Publishes the call, waits for all peers' calls, and compares them.
  void meet(Call const& call) {
    auto const sequence = call.header.sequence;
    awaited_.meets = true;
    group_.own().header(sequence) = call.header;
    group_.own().ready.publish(sequence);
    group_.wait_for_node(&RankControl::ready, sequence, awaited_);
    for (auto const peer : group_.on_node()) header(peer) = group_.control()[peer].header(sequence);
    if (crosses()) meet_nodes();
    awaited_.meets = false;
    for (int rank = 0; rank < group_.size(); ++rank) {
      auto const& first = headers_.front();
      auto const& other = header(rank);
      if (first.agrees(other)) {
        group_.expect_one_order(group_.note_of(awaited_.operation), call.header.numbers, other.numbers, rank);
        continue;
      }
      auto const text = comm::disagreement_text(sequence, group_.world_rank_of(0), first.operation(),
                                                group_.world_rank_of(rank), other.operation());
      group_.fail_order(text, sequence);
      fail<OrderError>("rank {}: {}", group_.own_world_rank(), text);
    }
  }
  /// Headers of the ranks of a node travel together, from leader to leader, and on through shared memory.
  void meet_nodes() {
    auto const& places = group_.placement();
    auto const bytes = [&](int node) { return places.members(node).size() * sizeof(Header); };
    if (places.leads()) {
      by_node_.clear();
      std::vector<std::size_t> begins;
      for (int node = 0; node < places.nodes(); ++node) {
        begins.push_back(by_node_.size());
        for (auto const rank : places.members(node)) by_node_.push_back(header(rank));
      }
      auto const of = [&](int node) { return by_node_.data() + begins[static_cast<std::size_t>(node)]; };
      for (int node = 0; node < places.nodes(); ++node) {
        if (node == places.own_node()) continue;
        messages_.receive(places.leader(node), of(node), bytes(node));
        messages_.send(places.leader(node), of(places.own_node()), bytes(places.own_node()));
      }
      messages_.close_round();
      messages_.wait_all(waiter());
    }
    meet_step([&](std::byte* scratch) {
      if (places.leads()) copy(scratch, by_node_.data(), by_node_.size() * sizeof(Header));
    });
    auto const* next = staged(places.leader(places.own_node()));
    for (int node = 0; node < places.nodes(); ++node) {
      for (auto const rank : places.members(node)) {
        std::memcpy(&header(rank), next, sizeof(Header));
        next += sizeof(Header);
      }
    }
  }
  /// Takes back messages after a failure. Buffers that MPI may still touch stay.
  void abandon() {
    if (messages_.abandon()) return;
    group_.keep_memory();
    static_cast<void>(new std::vector<Header>(std::move(by_node_)));
    static_cast<void>(new std::vector<std::byte>(std::move(received_)));
    static_cast<void>(new std::vector<std::byte>(std::move(partial_)));
    by_node_.clear();
    received_.clear();
    partial_.clear();
  }
  template <class Predicate>
  bool all(Predicate&& holds) const {
    return std::all_of(headers_.begin(), headers_.end(), holds);
  }

  /// Copies into this rank's scratch by `fill(scratch)`, and returns when all ranks of the node have done theirs. Two
  /// halves take turns: a rank begins step s + 1 when all have begun s, and so have read what was staged in s - 1.
  template <class Fill>
  void meet_step(Fill&& fill) {
    ++step_;
    fill(group_.control().scratch(group_.rank(), step_));
    group_.own().step.publish(step_);
    group_.wait_for_node(&RankControl::step, step_, awaited_);
  }
  std::byte const* staged(int rank) { return group_.control().scratch(rank, step_); }

  std::size_t chunk_bytes(bool direct, std::size_t staged) const {
    std::size_t chunk = direct ? static_cast<std::size_t>(-1) : staged;
    if (crosses()) chunk = std::min(chunk, Messages::chunk_bytes);
    return chunk / 64 * 64;
  }

  Header& header(int rank) { return headers_[static_cast<std::size_t>(rank)]; }
  /// Whether the ranks are on several nodes.
  bool crosses() const { return !group_.elsewhere().empty(); }
  bool is_alone_on_node() const { return group_.on_node().size() == 1; }

  /// The other ranks on the node, from the next one on, so that not all read the same memory at once.
  template <class Visit>
  void for_each_neighbour(Visit&& visit) const {
    auto const& ranks = group_.on_node();
    auto const self = std::find(ranks.begin(), ranks.end(), group_.rank());
    std::for_each(self + 1, ranks.end(), visit);
    std::for_each(ranks.begin(), self, visit);
  }

  Group& group_;
  Messages messages_;
  std::vector<Header> headers_;      // of the running collective, by rank
  std::vector<Header> by_node_;      // a leader's, as they travel
  std::vector<std::byte> received_;  // chunks from other nodes
  std::vector<std::byte> partial_;   // chunks of partial sums for ranks on other nodes
  Awaited awaited_;                  // of the running collective
  std::uint64_t step_ = 0;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::mpi::detail
