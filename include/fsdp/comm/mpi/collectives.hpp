// SPDX-License-Identifier: Apache-2.0
// The collectives as a stream's worker runs them: shared memory on the node, messages across nodes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "fsdp/comm/common/operation.hpp"
#include "fsdp/comm/mpi/call.hpp"
#include "fsdp/comm/mpi/control.hpp"
#include "fsdp/comm/mpi/group.hpp"
#include "fsdp/comm/mpi/messages.hpp"
#include "fsdp/comm/mpi/sum.hpp"
#include "fsdp/concepts.hpp"
#include "fsdp/failure.hpp"
#include "fsdp/wait_site.hpp"

namespace fsdp::mpi::detail {

/// Runs the collectives of one communicator. Used by the worker of the communicator's stream alone.
///
/// [Note: Direct or staged] Where all inputs lie in shared memory, ranks read them in place, in one pass. If any rank's
/// input lies elsewhere, all ranks copy theirs through scratch in shared memory, in steps of half the scratch area,
/// while the other half is still being read. All ranks see all headers, so all take the same path.
class Collectives {
 public:
  explicit Collectives(Group& group)
      : group_(group),
        messages_(group.comm()),
        headers_(static_cast<std::size_t>(group.size())),
        sum_(headers_.size()) {}

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

  /// The call will not be run, because its stream has failed: peers that wait for it, or for later ones, are told.
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

  static void copy(void* to, void const* from, std::size_t bytes) {
    if (bytes != 0 && to != from) std::memcpy(to, from, bytes);
  }
  static void run_alone(Call const& call) {
    if (call.header.collective != Collective::broadcast)
      copy(call.receive, call.send, call.header.count * call.element());
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
            return ranks;
          });
    };
  }

  /// Publishes the call, waits for all peers' calls, and compares them.
  void meet(Call const& call) {
    auto const sequence = call.header.sequence;
    group_.own().header(sequence) = call.header;
    group_.own().ready.publish(sequence);
    for (auto const peer : group_.elsewhere()) {
      messages_.receive(peer, &headers_[static_cast<std::size_t>(peer)], sizeof(Header));
      messages_.send(peer, &call.header, sizeof(Header));
    }
    messages_.close_round();
    group_.wait_for_node(&RankControl::ready, sequence, awaited_);
    messages_.wait_all(waiter());
    for (auto const peer : group_.on_node())
      headers_[static_cast<std::size_t>(peer)] = group_.control()[peer].header(sequence);
    for (int rank = 0; rank < group_.size(); ++rank) {
      auto const& first = headers_.front();
      auto const& other = headers_[static_cast<std::size_t>(rank)];
      if (first.agrees(other)) {
        group_.expect_one_order(group_.note_of(awaited_.operation), call.header.numbers, other.numbers, rank);
        continue;
      }
      auto const text = comm::disagreement_text(sequence, group_.world_rank_of(0), first.operation().describe(),
                                                group_.world_rank_of(rank), other.operation().describe());
      group_.fail_order(text, sequence);
      fail<OrderError>("rank {}: {}", group_.own_world_rank(), text);
    }
  }
  /// After a failure: what MPI may still touch stays.
  void abandon() {
    if (messages_.abandon()) return;
    group_.keep_memory();
    static_cast<void>(new std::vector<Header>(std::move(headers_)));
    static_cast<void>(new std::vector<std::byte>(std::move(received_)));
    headers_.assign(static_cast<std::size_t>(group_.size()), {});
    received_.clear();
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
    if (!group_.elsewhere().empty()) chunk = std::min(chunk, Messages::chunk_bytes);
    return chunk / 64 * 64;
  }

  /// Each rank's part travels to all others. `fetch(peer, begin, bytes)` moves a neighbour's where none is staged.
  template <class Fetch>
  void gather(Call const& call, Parts parts, std::byte const* own, std::byte* to, bool direct, Fetch&& fetch) {
    std::size_t const element = call.element();
    auto const self = static_cast<std::size_t>(group_.rank());
    std::size_t const chunk = chunk_bytes(direct, group_.control().half()) / element;
    for (std::size_t begin = 0; begin < parts.part; begin += std::min(chunk, parts.part - begin)) {
      for (auto const peer : group_.elsewhere()) {
        auto const r = static_cast<std::size_t>(peer);
        messages_.receive(peer, to + (parts.begin(r) + begin) * element, parts.length(r, begin, chunk) * element);
        messages_.send(peer, own + begin * element, parts.length(self, begin, chunk) * element);
      }
      messages_.close_round();
      auto const own_bytes = parts.length(self, begin, chunk) * element;
      if (!direct) meet_step([&](std::byte* scratch) { copy(scratch, own + begin * element, own_bytes); });
      for_each_neighbour([&](int peer) {
        auto const r = static_cast<std::size_t>(peer);
        auto const bytes = parts.length(r, begin, chunk) * element;
        if (bytes == 0) return;
        if (direct) return fetch(peer, begin * element, bytes);
        copy(to + (parts.begin(r) + begin) * element, staged(peer), bytes);
      });
      copy(to + (parts.begin(self) + begin) * element, own + begin * element, own_bytes);
      while (messages_.rounds_in_flight() > 2) messages_.wait_round(waiter());
    }
    messages_.wait_all(waiter());
  }

  /// Sums this rank's part over all ranks into `to`. Where an all_reduce reads peers' memory, it writes the sum there
  /// as well.
  void scatter(Call const& call, Parts parts, std::byte* to, bool direct) {
    std::size_t const element = call.element();
    auto const ranks = static_cast<std::size_t>(group_.size());
    auto const self = static_cast<std::size_t>(group_.rank());
    std::size_t const slot = group_.control().half() / ranks / 64 * 64;  // of one peer in the scratch
    std::size_t const chunk = chunk_bytes(direct, slot) / element;
    std::size_t const received_bytes = std::min(chunk, parts.part) * element;
    if (!group_.elsewhere().empty()) received_.resize(std::max(received_.size(), 2 * ranks * received_bytes));
    auto const received = [&](std::size_t rank, std::size_t begin) {
      return received_.data() + (begin / chunk % 2 * ranks + rank) * received_bytes;
    };
    auto const post = [&](std::size_t begin) {
      for (auto const peer : group_.elsewhere()) {
        auto const r = static_cast<std::size_t>(peer);
        messages_.receive(peer, received(r, begin), parts.length(self, begin, chunk) * element);
        messages_.send(peer, call.send + (parts.begin(r) + begin) * element, parts.length(r, begin, chunk) * element);
      }
      messages_.close_round();
    };
    if (parts.part > 0) post(0);
    for (std::size_t begin = 0; begin < parts.part;) {
      std::size_t const next = begin + std::min(chunk, parts.part - begin);
      if (next < parts.part) post(next);
      if (!direct)
        meet_step([&](std::byte* scratch) {
          for_each_neighbour([&](int peer) {
            auto const r = static_cast<std::size_t>(peer);
            copy(scratch + r * slot, call.send + (parts.begin(r) + begin) * element,
                 parts.length(r, begin, chunk) * element);
          });
        });
      messages_.wait_round(waiter());
      auto const length = parts.length(self, begin, chunk);
      std::size_t const offset = (parts.begin(self) + begin) * element;
      if (length > 0) {
        for (auto const peer : group_.elsewhere())
          sum_.from[static_cast<std::size_t>(peer)] = received(static_cast<std::size_t>(peer), begin);
        for_each_neighbour([&](int peer) {
          auto const r = static_cast<std::size_t>(peer);
          sum_.from[r] = direct ? group_.address(headers_[r].send, peer) + offset : staged(peer) + self * slot;
        });
        sum_.from[self] = call.send + offset;
        if (direct && call.header.collective != Collective::reduce_scatter)
          for_each_neighbour([&](int peer) {
            auto const r = static_cast<std::size_t>(peer);
            sum_.to.push_back(group_.address(headers_[r].receive, peer) + offset);
          });
        sum_.run(call.header.type, call.takes_mean(), to + begin * element, length);
      }
      begin = next;
    }
    messages_.wait_all(waiter());
  }

  void all_gather(Call const& call) {
    std::size_t const count = call.header.count;
    bool const direct = all([](Header const& h) { return h.send.direct; });
    gather(call, {count * static_cast<std::size_t>(group_.size()), count}, call.send, call.receive, direct,
           [&](int peer, std::size_t begin, std::size_t bytes) {
             auto const r = static_cast<std::size_t>(peer);
             copy(call.receive + r * count * call.element() + begin, group_.address(headers_[r].send, peer) + begin,
                  bytes);
           });
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
    gather(call, parts, own, call.receive, direct, [](int, std::size_t, std::size_t) {});  // scatter has done it
    if (direct) meet_step([](std::byte*) {});  // all ranks of the node have written here, and read what is here
  }

  void all_reduce_small(Call const& call) {
    std::size_t const bytes = call.header.count * call.element();
    if (bytes == 0) return;
    auto const ranks = static_cast<std::size_t>(group_.size());
    meet_step([&](std::byte* scratch) { copy(scratch, call.send, bytes); });
    received_.resize(std::max(received_.size(), ranks * small_all_reduce));
    for (auto const peer : group_.elsewhere()) {
      messages_.receive(peer, received_.data() + static_cast<std::size_t>(peer) * small_all_reduce, bytes);
      messages_.send(peer, staged(group_.rank()), bytes);
    }
    messages_.close_round();
    messages_.wait_all(waiter());
    for (auto const peer : group_.on_node()) sum_.from[static_cast<std::size_t>(peer)] = staged(peer);
    for (auto const peer : group_.elsewhere())
      sum_.from[static_cast<std::size_t>(peer)] = received_.data() + static_cast<std::size_t>(peer) * small_all_reduce;
    sum_.run(call.header.type, call.takes_mean(), call.receive, call.header.count);
  }

  void broadcast(Call const& call) {
    int const root = call.header.root;
    bool const is_root = root == group_.rank();
    auto const& place = headers_[static_cast<std::size_t>(root)].send;
    std::size_t const bytes = call.header.count * call.element();
    std::size_t const chunk = chunk_bytes(place.direct, group_.control().half());
    for (std::size_t begin = 0; begin < bytes;) {
      std::size_t const length = std::min(chunk, bytes - begin);
      if (is_root)
        for (auto const peer : group_.elsewhere()) messages_.send(peer, call.receive + begin, length);
      if (!group_.is_on_node(root)) messages_.receive(root, call.receive + begin, length);
      messages_.close_round();
      if (!place.direct)
        meet_step([&](std::byte* scratch) {
          if (is_root) copy(scratch, call.receive + begin, length);
        });
      if (!is_root && group_.is_on_node(root))
        copy(call.receive + begin, place.direct ? group_.address(place, root) + begin : staged(root), length);
      while (messages_.rounds_in_flight() > 2) messages_.wait_round(waiter());
      begin += length;
    }
    messages_.wait_all(waiter());
  }

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
  SpreadSum sum_;                    // the running one
  std::vector<std::byte> received_;  // chunks from other nodes
  Awaited awaited_;                  // of the running collective
  std::uint64_t step_ = 0;
};

}  // namespace fsdp::mpi::detail
