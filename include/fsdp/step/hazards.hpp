// SPDX-License-Identifier: Apache-2.0
// The waits that follow from accesses: read after write, write after read, write after write, write after peers' reads.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "fsdp/step/buffers.hpp"
#include "fsdp/step/operation.hpp"

namespace fsdp::step {

/// A point in a run: a vector clock (Mattern 1989). For each stream, it has the number of the last operation that has
/// ended; for each group, the number of the last collective that all peers have ended. Numbers count from 1; 0: none.
struct Point {
  std::array<std::uint64_t, stream_kinds> streams{};
  std::array<std::uint64_t, groups> peers{};

  std::uint64_t& operator[](StreamKind stream) { return streams[static_cast<std::size_t>(stream)]; }
  std::uint64_t operator[](StreamKind stream) const { return streams[static_cast<std::size_t>(stream)]; }
  std::uint64_t& operator[](Group group) { return peers[static_cast<std::size_t>(group)]; }
  std::uint64_t operator[](Group group) const { return peers[static_cast<std::size_t>(group)]; }
  void join(Point const& other) {
    for (std::size_t i = 0; i < streams.size(); ++i) streams[i] = std::max(streams[i], other.streams[i]);
    for (std::size_t i = 0; i < peers.size(); ++i) peers[i] = std::max(peers[i], other.peers[i]);
  }
};

/// Remembers the last accesses to each cell, and each stream's knowledge of the others. It enqueues nothing. Before
/// each operation, the caller asks for the waits, enqueues them and reports them with learn(); then it enqueues the
/// operation and reports it with after().
///
/// [Note: Order among peers] When collective n of a communicator completes on a rank, all its peers have begun n. A
/// peer begins n after it ended n-1. So all peers have ended n-1. They have also ended the earlier collectives of a
/// communicator over a subset of these ranks, if both communicators enqueue on the same stream (`contains`). A
/// communicator that cannot promise this says so with `completes_in_order`: see Communicator.
class Hazards {
 public:
  Hazards() = default;
  /// @param order_among_peers  see [Note: Order among peers]
  [[gnu::cold]] explicit Hazards(Buffers const& buffers, bool order_among_peers = true)
      : cells_(buffers), order_among_peers_(order_among_peers) {}

  /// @return whether an operation must wait for something that its stream does not know
  [[gnu::noinline]] bool must_wait(Operation const& operation) const {
    auto const stream = index(operation.stream);
    auto const& known = known_[stream];
    for (std::size_t i = 0; i < operation.size; ++i) {
      if ((operation.tracked >> i & 1u) == 0) continue;
      auto const& access = operation.all[i];
      for (auto const& cell : cells_[access.cells]) {
        if (cell.write > known.streams[cell.writer]) return true;
        if (access.mode == Mode::read) continue;
        bool waits = peers_may_read(cell, operation, known);
        for (std::size_t other = 0; other < stream_kinds; ++other)
          waits = waits || cell.reads[other] > known.streams[other];
        if (waits) return true;
      }
    }
    return false;
  }
  /// Waits that an operation needs, before it is enqueued: numbers that its stream does not know; 0: none.
  struct Needs {
    Point until;
    /// The pools of the cells, for the waits' names.
    std::array<Pool, stream_kinds> stream_pools{};
    std::array<Pool, groups> peer_pools{};
  };
  [[gnu::noinline]] Needs before(Operation const& operation) const {
    Needs needs;
    auto const& known = known_[index(operation.stream)];
    for (std::size_t i = 0; i < operation.size; ++i) {
      if ((operation.tracked >> i & 1u) == 0) continue;
      auto const& access = operation.all[i];
      auto const of_stream = [&](std::size_t stream, std::uint64_t number) {
        if (number <= std::max(known.streams[stream], needs.until.streams[stream])) return;
        needs.until.streams[stream] = number;
        needs.stream_pools[stream] = access.cells.pool;
      };
      for (auto const& cell : cells_[access.cells]) {
        of_stream(cell.writer, cell.write);
        if (access.mode == Mode::read) continue;
        for (std::size_t stream = 0; stream < stream_kinds; ++stream) of_stream(stream, cell.reads[stream]);
        auto const group = static_cast<std::size_t>(cell.group);
        if (!peers_may_read(cell, operation, known) || cell.collective <= needs.until.peers[group]) continue;
        needs.until.peers[group] = cell.collective;
        needs.peer_pools[group] = access.cells.pool;
      }
    }
    return needs;
  }

  /// The stream has waited for a point in a run.
  void learn(StreamKind stream, Point const& point) { known_[index(stream)].join(point); }
  /// The stream has waited until all peers have ended a collective.
  void learn(StreamKind stream, Group group, std::uint64_t collective) {
    auto& known = known_[index(stream)][group];
    known = std::max(known, collective);
  }

  /// An operation has been enqueued.
  /// @param collective  its number among those of its communicator; 0: no collective
  [[gnu::noinline]] void after(Operation const& operation, std::uint64_t collective = 0) {
    if (!operation.is_tracked()) return;
    auto const stream = index(operation.stream);
    auto& known = known_[stream];
    auto const number = ++known.streams[stream];
    if (collective != 0) {
      if (order_among_peers_) learn_of_peers(known, operation.group, collective);
      last_[static_cast<std::size_t>(operation.group)] = collective;
    }
    for (std::size_t i = 0; i < operation.size; ++i) {
      if ((operation.tracked >> i & 1u) == 0) continue;
      auto const& access = operation.all[i];
      for (auto& cell : cells_[access.cells]) {
        if (access.mode == Mode::read) {
          cell.reads[stream] = number;
        } else {  // one by one: compilers would assemble a whole cell on the stack
          cell.write = number;
          cell.reads.fill(0);
          cell.collective = 0;
          cell.writer = operation.stream_index();
          cell.group = Group::none;
        }
        if (collective != 0 && peers_read(operation.primitive, access)) {
          cell.collective = collective;
          cell.group = operation.group;
        }
      }
    }
  }

  /// The point that a stream knows, its own operations included: that of an event that is recorded now.
  Point const& point(StreamKind stream) const { return known_[index(stream)]; }
  /// Number of the stream's last operation.
  std::uint64_t number(StreamKind stream) const { return point(stream)[stream]; }

 private:
  /// The last accesses to a cell.
  struct Cell {
    std::uint64_t write = 0;
    std::array<std::uint64_t, stream_kinds> reads{};  ///< since, by stream
    std::uint64_t collective = 0;                     ///< the last one since in which peers read it
    std::uint8_t writer = 0;                          ///< stream
    Group group{};                                    ///< of the collective
  };

  static std::size_t index(StreamKind stream) { return static_cast<std::size_t>(stream); }
  /// A collective orders what follows it on its own communicator.
  bool peers_may_read(Cell const& cell, Operation const& operation, Point const& known) const {
    return cell.collective > known.peers[static_cast<std::size_t>(cell.group)] &&
           !(order_among_peers_ && cell.group == operation.group);
  }
  void learn_of_peers(Point& known, Group group, std::uint64_t collective) const {
    for (std::size_t part = 1; part < groups; ++part) {
      if (!contains(group, static_cast<Group>(part))) continue;
      auto const ended = static_cast<Group>(part) == group ? collective - 1 : last_[part];
      known.peers[part] = std::max(known.peers[part], ended);
    }
  }

  PerCell<Cell> cells_;
  bool order_among_peers_ = true;
  std::array<Point, stream_kinds> known_{};   ///< by each stream
  std::array<std::uint64_t, groups> last_{};  ///< collective of each group
};

/// Calls `wait(stream)` for each stream that an operation must wait for, unless the event of another such stream
/// implies this wait.
/// @param point_of  point_of(stream): the point of the stream's event
template <class PointOf, class Wait>
void for_each_event(Hazards::Needs const& needs, PointOf const& point_of, Wait const& wait) {
  for (std::size_t i = 0; i < stream_kinds; ++i) {
    if (needs.until.streams[i] == 0) continue;
    bool implied = false;
    for (std::size_t j = 0; j < stream_kinds && !implied; ++j)
      implied = j != i && needs.until.streams[j] != 0 &&
                point_of(static_cast<StreamKind>(j)).streams[i] >= needs.until.streams[i];
    if (!implied) wait(static_cast<StreamKind>(i));
  }
}

}  // namespace fsdp::step
