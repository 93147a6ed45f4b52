// SPDX-License-Identifier: Apache-2.0
// The waits that follow from the accesses of a list.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "tests/support/step/buffers.hpp"
#include "tests/support/step/operation.hpp"

namespace fsdp::step {

/// A stream waits until an operation of another stream has ended, or a collective on all of its members.
struct Wait {
  std::size_t operation;
  bool peers;
};

/// Derives the waits of each operation: read after write, write after read, write after write, and write after peers'
/// reads. An operation does not wait for what its stream knows already: from its own operations, from earlier waits,
/// and from what the operations that these waited for knew. A member that begins a collective has ended the ones before
/// it on the same communicator.
class Waits {
 public:
  Waits(List const& list, Buffers const& buffers) : cells_(buffers) {
    for (std::size_t i = 0; i < list.operations.size(); ++i) {
      auto const& operation = list.operations[i];
      waits_.emplace_back();
      after_.push_back(known_[stream_of(operation)]);
      if (is_ordered(operation.primitive)) derive(i, operation, list.of(operation));
    }
  }

  /// Of operation `index`: for events, then for peers.
  std::vector<Wait> const& of(std::size_t index) const { return waits_[index]; }
  /// The operations whose end a stream waits for: an event is recorded behind them.
  std::vector<bool> awaited() const {
    std::vector<bool> awaited(waits_.size(), false);
    for (auto const& waits : waits_)
      for (auto const& wait : waits) awaited[wait.operation] = awaited[wait.operation] || !wait.peers;
    return awaited;
  }

 private:
  static constexpr auto streams_ = static_cast<std::size_t>(StreamKind::count_);
  static constexpr auto groups_ = static_cast<std::size_t>(Group::count_);
  /// Of each stream the last operation that has ended; of each group the last collective that peers have ended. Numbers
  /// count from 1; 0: none.
  using Clock = std::array<std::size_t, streams_ + groups_>;
  /// The last accesses to a cell.
  struct Last {
    std::size_t stream = 0, write = 0;
    Clock reads{};  ///< since, by this rank and by peers
  };

  static std::size_t stream_of(Operation const& operation) { return static_cast<std::size_t>(operation.stream); }
  static std::size_t group_of(Operation const& operation) {
    return streams_ + static_cast<std::size_t>(operation.group);
  }
  static void join(Clock& into, Clock const& other) {
    for (std::size_t i = 0; i < into.size(); ++i) into[i] = std::max(into[i], other[i]);
  }

  void derive(std::size_t index, Operation const& operation, std::span<Access const> accesses) {
    auto const stream = stream_of(operation), group = group_of(operation);
    auto& known = known_[stream];
    bool const collective = is_collective(operation.primitive);
    if (collective) known[group] = last_[group];
    Clock needed{};
    for (auto const& access : accesses)
      for (auto const& cell : cells_[access.cells]) {
        needed[cell.stream] = std::max(needed[cell.stream], cell.write);
        if (access.mode != Mode::read) join(needed, cell.reads);
      }
    needed[stream] = 0;
    for (std::size_t i = 0; i < needed.size(); ++i)
      if (needed[i] <= known[i]) needed[i] = 0;
    await_events(index, needed, known);
    for (auto peers = streams_; peers < needed.size(); ++peers) {
      if (needed[peers] <= known[peers]) continue;
      waits_[index].push_back({needed[peers] - 1, true});
      join(known, after_[needed[peers] - 1]);
      known[peers] = needed[peers];
    }
    known[stream] = index + 1;
    if (collective) last_[group] = index + 1;
    after_[index] = known;
    for (auto const& access : accesses)
      for (auto& cell : cells_[access.cells]) {
        if (access.mode == Mode::read) {
          cell.reads[stream] = index + 1;
        } else {
          cell = {stream, index + 1, {}};
        }
        if (peers_read(operation.primitive, access)) cell.reads[group] = index + 1;
      }
  }
  /// An event that another needed one implies is not waited for.
  void await_events(std::size_t index, Clock const& needed, Clock& known) {
    for (std::size_t i = 0; i < streams_; ++i) {
      if (needed[i] == 0) continue;
      bool implied = false;
      for (std::size_t j = 0; j < streams_; ++j)
        implied = implied || (j != i && needed[j] != 0 && after_[needed[j] - 1][i] >= needed[i]);
      if (!implied) waits_[index].push_back({needed[i] - 1, false});
    }
    for (std::size_t i = 0; i < streams_; ++i)
      if (needed[i] != 0) join(known, after_[needed[i] - 1]);
  }

  PerCell<Last> cells_;
  std::array<Clock, streams_> known_{};  ///< by each stream
  Clock last_{};                         ///< collective of each group
  std::vector<Clock> after_;             ///< by operation: what its stream knows when it has ended
  std::vector<std::vector<Wait>> waits_;
};

}  // namespace fsdp::step
