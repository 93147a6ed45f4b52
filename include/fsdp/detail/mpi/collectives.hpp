// SPDX-License-Identifier: Apache-2.0
// Collectives as run by a stream's worker: ranks meet, compare their calls, and move data together, through shared
// memory on the node and by messages across nodes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "fsdp/concepts.hpp"
#include "fsdp/detail/base/streams.hpp"
#include "fsdp/detail/comm/messages.hpp"
#include "fsdp/detail/mpi/control.hpp"
#include "fsdp/detail/mpi/group.hpp"
#include "fsdp/detail/mpi/messages.hpp"
#include "fsdp/detail/mpi/placement.hpp"
#include "fsdp/detail/mpi/sums.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::mpi::detail {

/// An enqueued collective.
struct Call {
  Header header;
  std::byte const* send = nullptr;
  std::byte* receive = nullptr;

  std::size_t element() const { return size_of(header.type); }
  bool takes_mean() const { return header.collective == Collective::all_reduce_mean; }
};

/// Division of elements over ranks: equal parts, the last ones shorter or empty.
struct Parts {
  std::size_t total;
  std::size_t part;

  std::size_t begin(std::size_t rank) const { return std::min(total, rank * part); }
  /// Elements of `rank`'s part in [from, from + at_most).
  std::size_t length(std::size_t rank, std::size_t from, std::size_t at_most) const {
    std::size_t const size = std::min(total, (rank + 1) * part) - begin(rank);
    return size <= from ? 0 : std::min(at_most, size - from);
  }
};

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

/// The two data movements of gathers and reductions. Used by the worker of the communicator's stream alone.
class Slices : protected Steps {
 public:
  explicit Slices(Group& group) : Steps(group), sum_(group.placement()) {}

 protected:
  /// Each rank's part of `call.receive` travels to all others. `fetch(peer, begin, bytes)` moves a neighbour's where
  /// none is staged.
  template <class Fetch>
  void gather(Call const& call, Parts parts, std::byte const* own, bool direct, Fetch&& fetch) {
    Gather const now{*this, call, parts, own, direct};
    if (parts.part > 0) now.post(0);
    for (std::size_t begin = 0; begin < parts.part;) {
      std::size_t const next = begin + std::min(now.chunk, parts.part - begin);
      if (next < parts.part) now.post(next);
      if (direct) now.take_neighbours(begin, fetch);
      if (direct && is_alone_on_node()) {
        while (messages_.rounds_in_flight() > 2) messages_.wait_round(waiter());
      } else {
        messages_.wait_round(waiter());
        if (!direct || crosses()) meet_step([&](std::byte* scratch) { now.stage(scratch, begin); });
        if (!direct) now.take_neighbours(begin, fetch);
        now.take_carried(begin);
      }
      begin = next;
    }
    messages_.wait_all(waiter());
  }

  /// Sums this rank's part over all ranks into `to`. Where an all_reduce reads peers' memory, it writes the sum there
  /// as well.
  void scatter(Call const& call, Parts parts, std::byte* to, bool direct) {
    Scatter const now{*this, call, parts, to, direct};
    if (direct && parts.part > 0) now.post(0);
    for (std::size_t begin = 0; begin < parts.part;) {
      std::size_t const next = begin + std::min(now.chunk, parts.part - begin);
      if (!direct) {
        meet_step([&](std::byte* scratch) { now.stage(scratch, begin); });
        now.post(begin);
      } else if (next < parts.part) {
        now.post(next);
      }
      messages_.wait_round(waiter());
      now.sum_own(begin);
      begin = next;
    }
    messages_.wait_all(waiter());
  }

  TreeSum sum_;  // the running one

 private:
  /// A chunk of a collective: elements from `begin` on of each rank's part.
  struct Chunks {
    Slices& of;
    Call const& call;
    Parts parts;
    bool direct;
    std::size_t chunk = 0, slot = 0;  ///< elements; bytes of the scratch for one rank

    Group& group() const { return of.group_; }
    Placement const& places() const { return of.group_.placement(); }
    Messages& messages() const { return of.messages_; }
    int own_rank() const { return of.group_.rank(); }
    std::size_t element() const { return call.element(); }
    /// The address of a rank's chunk in a buffer of all parts, from the buffer's begin, in bytes.
    std::size_t offset(int rank, std::size_t begin) const {
      return (parts.begin(static_cast<std::size_t>(rank)) + begin) * element();
    }
    std::size_t length(int rank, std::size_t begin) const {
      return parts.length(static_cast<std::size_t>(rank), begin, chunk);
    }
    std::size_t bytes(int rank, std::size_t begin) const { return length(rank, begin) * element(); }
  };

  struct Gather : Chunks {
    std::byte const* own;

    Gather(Slices& slices, Call const& now, Parts all, std::byte const* from, bool is_direct)
        : Chunks{slices, now, all, is_direct}, own(from) {
      // Staged are this rank's part and those that it carries.
      slot = group().control().half() / (1 + places().most_carried()) / 64 * 64;
      chunk = of.chunk_bytes(direct, slot) / element();
    }
    /// Sends this rank's chunk to other nodes, and receives the chunks that it carries.
    void post(std::size_t begin) const {
      for (int node = 0; node < places().nodes(); ++node)
        if (node != places().own_node())
          messages().send(places().carrier(node, own_rank()), own + begin * element(), bytes(own_rank(), begin));
      for (auto const rank : places().carried())
        messages().receive(rank, call.receive + offset(rank, begin), bytes(rank, begin));
      messages().close_round();
    }
    template <class Fetch>
    void take_neighbours(std::size_t begin, Fetch const& fetch) const {
      of.for_each_neighbour([&](int peer) {
        if (bytes(peer, begin) == 0) return;
        if (direct) return fetch(peer, begin * element(), bytes(peer, begin));
        copy(call.receive + offset(peer, begin), of.staged(peer), bytes(peer, begin));
      });
      copy(call.receive + offset(own_rank(), begin), own + begin * element(), bytes(own_rank(), begin));
    }
    void stage(std::byte* scratch, std::size_t begin) const {
      if (direct) return;
      copy(scratch, own + begin * element(), bytes(own_rank(), begin));
      for (auto const rank : places().carried())
        copy(scratch + (1 + places().slot(rank)) * slot, call.receive + offset(rank, begin), bytes(rank, begin));
    }
    /// Copies the chunks that neighbours carry.
    void take_carried(std::size_t begin) const {
      for (auto const rank : group().elsewhere()) {
        int const carrier = places().carrier(places().own_node(), rank);
        if (carrier == own_rank() || bytes(rank, begin) == 0) continue;
        copy(call.receive + offset(rank, begin),
             direct ? group().address(of.header(carrier).receive, carrier) + offset(rank, begin)
                    : of.staged(carrier) + (1 + places().slot(rank)) * slot,
             bytes(rank, begin));
      }
    }
  };

  struct Scatter : Chunks {
    using Piece = Placement::Piece;
    std::byte* to;
    std::size_t wide;               ///< bytes of an element of a partial sum
    std::size_t most;               ///< bytes of a chunk of partial sums
    std::size_t arriving, leaving;  ///< chunks that come from other nodes, and partial sums for them

    Scatter(Slices& slices, Call const& now, Parts all, std::byte* sum, bool is_direct)
        : Chunks{slices, now, all, is_direct}, to(sum), wide(size_of(partial_type(now.header.type))) {
      slot = group().control().half() / static_cast<std::size_t>(group().size()) / 64 * 64;
      chunk = of.chunk_bytes(direct, slot) / (of.crosses() ? wide : element());
      most = std::min(chunk, parts.part) * wide;
      auto const count = [&](auto const& has) {
        return static_cast<std::size_t>(std::count_if(places().pieces().begin(), places().pieces().end(), has));
      };
      arriving = count([&](Piece const& piece) { return !is_own(piece); });
      leaving = places().carried().size() * count([&](Piece const& p) { return is_own(p) && is_partial(p); });
      // Two chunks of each are under way.
      of.received_.resize(std::max(of.received_.size(), 2 * arriving * most));
      of.partial_.resize(std::max(of.partial_.size(), 2 * leaving * most));
    }
    static bool is_partial(Piece const& piece) { return piece.ranks > 1; }
    bool is_own(Piece const& piece) const { return piece.node == places().own_node(); }
    std::size_t half(std::size_t begin) const { return begin / chunk % 2; }
    /// The data of `peer`, a rank of this node, for `rank`.
    std::byte const* data(int peer, int rank, std::size_t begin) const {
      if (peer == own_rank()) return call.send + offset(rank, begin);
      if (direct) return group().address(of.header(peer).send, peer) + offset(rank, begin);
      return of.staged(peer) + static_cast<std::size_t>(rank) * slot;
    }
    void stage(std::byte* scratch, std::size_t begin) const {
      if (of.is_alone_on_node()) return;
      for (int rank = 0; rank < group().size(); ++rank)
        if (rank != own_rank())
          copy(scratch + static_cast<std::size_t>(rank) * slot, call.send + offset(rank, begin), bytes(rank, begin));
    }
    /// Receives what other nodes add to this rank's part, and sends what this rank has for ranks there.
    void post(std::size_t begin) const {
      auto* arrives = of.received_.data() + half(begin) * arriving * most;
      auto* leaves = of.partial_.data() + half(begin) * leaving * most;
      for (auto const& piece : places().pieces()) {
        if (is_own(piece)) continue;
        int const from = is_partial(piece) ? places().carrier(piece.node, own_rank()) : piece.first;
        messages().receive(from, arrives, length(own_rank(), begin) * (is_partial(piece) ? wide : element()));
        arrives += most;
      }
      for (auto const& piece : places().pieces()) {
        if (!is_own(piece)) continue;
        if (is_partial(piece)) {
          for (auto const rank : places().carried()) {
            send_partial(piece, rank, leaves, begin);
            leaves += most;
          }
        } else if (piece.first == own_rank()) {
          for (auto const rank : group().elsewhere())
            messages().send(rank, call.send + offset(rank, begin), bytes(rank, begin));
        }
      }
      messages().close_round();
    }
    void send_partial(Piece const& piece, int rank, std::byte* buffer, std::size_t begin) const {
      if (length(rank, begin) == 0) return;
      of.sources_.clear();
      for (int peer = piece.first; peer < piece.first + piece.ranks; ++peer)
        of.sources_.push_back(data(peer, rank, begin));
      partial_sum(call.header.type, of.sources_.data(), of.sources_.size(), buffer, length(rank, begin));
      messages().send(rank, buffer, length(rank, begin) * wide);
    }
    void sum_own(std::size_t begin) const {
      std::size_t const count = length(own_rank(), begin);
      if (count == 0) return;
      auto& sum = of.sum_;
      auto* arrived = of.received_.data() + half(begin) * arriving * most;
      for (auto const& piece : places().pieces()) {
        if (is_own(piece)) continue;
        sum.from[static_cast<std::size_t>(piece.first)] = arrived;
        arrived += most;
      }
      for (auto const peer : group().on_node())
        sum.from[static_cast<std::size_t>(peer)] = data(peer, own_rank(), begin);
      if (direct && call.header.collective != Collective::reduce_scatter)
        of.for_each_neighbour([&](int peer) {
          sum.to.push_back(group().address(of.header(peer).receive, peer) + offset(own_rank(), begin));
        });
      sum.run(call.header.type, call.takes_mean(), to + begin * element(), count);
    }
  };

  std::vector<void const*> sources_;  // of a partial sum
};

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
    CallDescription const waiting{
        .call = "wait_for_peers", .label = {{}, fsdp::name(site)}, .communicator = group_.name()};
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
