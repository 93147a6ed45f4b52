// SPDX-License-Identifier: Apache-2.0
// Derives waits from accesses: read after write, write after read, write after write, write after peers' reads.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "fsdp/detail/step/buffers.hpp"
#include "fsdp/detail/step/operation.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::step {

/// A point in a run, as a vector clock (Mattern 1989). For each stream, it has the number of the last operation that
/// has ended; for each group, the number of the last collective that all peers have ended. Numbers count from 1; 0:
/// none.
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

/// Calls `visit(index)` for each bit that is set, the lowest first.
template <class Visit>
constexpr void for_each_bit(std::uint32_t bits, Visit const& visit) {
  for (; bits != 0; bits &= bits - 1) visit(static_cast<std::size_t>(std::countr_zero(bits)));
}

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

  /// The highest numbers to wait for. Only elements whose bits are set have values: most operations need no wait, and
  /// arrays are not cleared for them.
  template <std::size_t size>
  struct Highest {
    std::uint32_t bits = 0;
    std::array<std::uint64_t, size> numbers;
    std::array<Pool, size> pools;  ///< of the cells, for names of waits

    Highest() {}  // NOLINT(modernize-use-equals-default): see above
    void raise(std::size_t index, std::uint64_t number, Pool pool) {
      if ((bits >> index & 1u) != 0 && number <= numbers[index]) return;
      bits |= 1u << index;
      numbers[index] = number;
      pools[index] = pool;
    }
  };
  /// Waits that an operation needs before it is enqueued, for numbers that its stream does not know.
  struct Needs {
    Highest<stream_kinds> streams;  ///< operations of each stream
    Highest<groups> peers;          ///< collectives of each group
    bool some() const { return (streams.bits | peers.bits) != 0; }
  };
  [[gnu::noinline]] Needs before(Operation const& operation) const {
    Needs needs;
    auto const& known = known_[index(operation.stream)];
    for (std::size_t i = 0; i < operation.size; ++i) {
      auto const accessors = operation.conflicts[i];
      if (accessors == 0) continue;
      auto const& access = operation.all[i];
      auto const pool = access.cells.pool;
      for (auto const& cell : cells_[access.cells]) {
        if (cell.write > known.streams[cell.writer]) needs.streams.raise(cell.writer, cell.write, pool);
        if (access.mode == Mode::read) continue;
        for_each_bit(accessors & ~unsigned{peers}, [&](std::size_t stream) {
          if (cell.reads[stream] > known.streams[stream]) needs.streams.raise(stream, cell.reads[stream], pool);
        });
        if ((accessors & peers) != 0 && peers_may_read(cell, operation, known))
          needs.peers.raise(static_cast<std::size_t>(cell.group), cell.collective, pool);
      }
    }
    return needs;
  }

  /// Records that the stream has waited for a point in a run.
  void learn(StreamKind stream, Point const& point) { known_[index(stream)].join(point); }
  /// Records that the stream has waited until all peers have ended a collective.
  void learn(StreamKind stream, Group group, std::uint64_t collective) {
    auto& known = known_[index(stream)][group];
    known = std::max(known, collective);
  }

  /// Records an operation that has been enqueued.
  /// @param operation   may_be_awaited()
  /// @param collective  its number among those of its communicator; 0: no collective
  [[gnu::noinline]] void after(Operation const& operation, std::uint64_t collective = 0) {
    auto const stream = index(operation.stream);
    auto& known = known_[stream];
    auto const number = ++known.streams[stream];
    if (collective != 0) {
      if (order_among_peers_) learn_of_peers(known, operation.group, collective);
      last_[static_cast<std::size_t>(operation.group)] = collective;
    }
    for (std::size_t i = 0; i < operation.size; ++i) {
      if (operation.conflicts[i] == 0) continue;
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

  /// The point that an event recorded now on the stream stands for: all that the stream knows, with its own operations.
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
  /// Whether peers may still read the cell. A collective orders what follows it on its own communicator.
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
  for_each_bit(needs.streams.bits, [&](std::size_t i) {
    bool implied = false;
    for_each_bit(needs.streams.bits & ~(1u << i), [&](std::size_t j) {
      implied = implied || point_of(static_cast<StreamKind>(j)).streams[i] >= needs.streams.numbers[i];
    });
    if (!implied) wait(static_cast<StreamKind>(i));
  });
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::step
