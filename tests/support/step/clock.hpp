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

/// A stream runs its operations in order. An operation begins when the last writes of what it accesses have ended, and
/// also the reads since, where it writes. All ranks run the same list at the same speed: peers have read what they read
/// of this rank when its own collective ends, which accesses the same cells. The host takes no time.
/// @return of each operation
inline std::vector<Span> simulate(List const& list, Buffers const& buffers, Costs const& costs) {
  struct Ends {
    double write = 0, read = 0;
  };
  PerCell<Ends> cells(buffers);
  std::array<double, static_cast<std::size_t>(StreamKind::count_)> streams{};
  std::vector<Span> spans;
  spans.reserve(list.operations.size());
  for (auto const& operation : list.operations) {
    auto& stream = streams[static_cast<std::size_t>(operation.stream)];
    auto begin = stream;
    bool const ordered = is_ordered(operation.primitive);
    if (ordered)
      for (auto const& access : list.of(operation))
        for (auto const& cell : cells[access.cells])
          begin = std::max(begin, access.mode == Mode::read ? cell.write : std::max(cell.write, cell.read));
    auto const end = begin + costs.of(operation);
    if (ordered) stream = end;
    spans.push_back({begin, end});
    if (ordered)
      for (auto const& access : list.of(operation))
        for (auto& cell : cells[access.cells]) {
          auto& last = access.mode == Mode::read ? cell.read : cell.write;
          last = std::max(last, end);
        }
  }
  return spans;
}

}  // namespace fsdp::step
