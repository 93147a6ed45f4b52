// SPDX-License-Identifier: Apache-2.0
// When each operation of a list runs, by what primitives cost.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "tests/support/step/buffers.hpp"
#include "tests/support/step/operation.hpp"

namespace fsdp::step {

/// Time of one operation.
struct Cost {
  double fixed = 0, per_byte = 0;
};
/// By primitive, and for collectives by group: groups within a node are faster than groups of nodes.
struct Costs {
  std::array<Cost, primitives> primitive{};
  std::array<double, static_cast<std::size_t>(Group::count_)> factor{1, 1, 1, 1, 1, 1};

  Cost& operator[](Primitive which) { return primitive[static_cast<std::size_t>(which)]; }
  double& operator[](Group which) { return factor[static_cast<std::size_t>(which)]; }
  double of(Operation const& operation) const {
    auto const& cost = primitive[static_cast<std::size_t>(operation.primitive)];
    return factor[static_cast<std::size_t>(operation.group)] *
           (cost.fixed + cost.per_byte * static_cast<double>(operation.bytes));
  }
};

struct Span {
  double begin = 0, end = 0;
};

/// Runs a list on several ranks. A stream runs its operations in order. An operation begins when the last writes of the
/// cells that it accesses have ended, and where it writes, also the reads since, of peers too. A collective begins when
/// it can begin on all members, and ends on each by that rank's cost. The host takes no time.
class Clock {
 public:
  /// @param ranks  costs of each rank of the world; one stands for ranks that are equal
  Clock(Buffers const& buffers, std::vector<Costs> const& ranks) {
    for (auto const& costs : ranks) ranks_.push_back({costs, PerCell<Ends>(buffers), {}, {}});
  }

  void run(List const& list) {
    for (auto const& operation : list.operations) run(operation, list.of(operation));
  }
  /// Of each operation so far.
  std::vector<Span> const& spans(std::size_t rank = 0) const { return ranks_[rank].spans; }

 private:
  /// When accesses to a cell so far have ended.
  struct Ends {
    double write = 0;
    double read = 0;  ///< by this rank and by peers
  };
  struct Rank {
    Costs costs;
    PerCell<Ends> cells;
    std::array<double, static_cast<std::size_t>(StreamKind::count_)> streams;  ///< when the last operation ends
    std::vector<Span> spans;
  };

  void run(Operation const& operation, std::span<Access const> accesses) {
    for (auto& rank : ranks_) rank.spans.push_back(begin(rank, operation, accesses));
    if (is_collective(operation.primitive)) meet(operation);
    for (auto& rank : ranks_) end(rank, operation, accesses);
    if (!is_collective(operation.primitive)) return;
    for (std::size_t i = 0; i < ranks_.size(); ++i)
      for (auto const& access : accesses)
        if (peers_read(operation.primitive, access))
          for (auto& cell : ranks_[i].cells[access.cells]) cell.read = std::max(cell.read, last_end(operation, i));
  }
  static Span begin(Rank& rank, Operation const& operation, std::span<Access const> accesses) {
    auto begin = rank.streams[static_cast<std::size_t>(operation.stream)];
    if (is_ordered(operation.primitive))
      for (auto const& access : accesses)
        for (auto const& cell : rank.cells[access.cells])
          begin = std::max(begin, access.mode == Mode::read ? cell.write : std::max(cell.write, cell.read));
    return {begin, begin};
  }
  static void end(Rank& rank, Operation const& operation, std::span<Access const> accesses) {
    auto& span = rank.spans.back();
    span.end = span.begin + rank.costs.of(operation);
    if (!is_ordered(operation.primitive)) return;
    rank.streams[static_cast<std::size_t>(operation.stream)] = span.end;
    for (auto const& access : accesses)
      for (auto& cell : rank.cells[access.cells]) {
        auto& last = access.mode == Mode::read ? cell.read : cell.write;
        last = std::max(last, span.end);
      }
  }
  /// Its members begin together.
  void meet(Operation const& operation) {
    std::vector<double> begins;
    for (auto const& rank : ranks_) begins.push_back(rank.spans.back().begin);
    for (std::size_t i = 0; i < ranks_.size(); ++i)
      for (std::size_t j = 0; j < ranks_.size(); ++j)
        if (share_group(operation, i, j))
          ranks_[i].spans.back().begin = std::max(ranks_[i].spans.back().begin, begins[j]);
  }
  /// Among the members of the group of a rank.
  double last_end(Operation const& operation, std::size_t rank) const {
    double end = 0;
    for (std::size_t other = 0; other < ranks_.size(); ++other)
      if (share_group(operation, rank, other)) end = std::max(end, ranks_[other].spans.back().end);
    return end;
  }
  /// See Placement: shard groups are consecutive ranks, replicas have equal places in them.
  bool share_group(Operation const& operation, std::size_t rank, std::size_t other) const {
    auto const members = static_cast<std::size_t>(operation.ranks);
    auto const groups = std::max<std::size_t>(ranks_.size() / members, 1);
    switch (operation.group) {
      case Group::gather:
      case Group::kept:
      case Group::reduce: return rank / members == other / members;
      case Group::replicas: return rank % groups == other % groups;
      default: return true;
    }
  }

  std::vector<Rank> ranks_;
};

}  // namespace fsdp::step
