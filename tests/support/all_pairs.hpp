// SPDX-License-Identifier: Apache-2.0
// Tables of test rows: all combinations of some axes, or few of them that hold every pair of values.
#pragma once

#include <cstddef>
#include <set>
#include <utility>
#include <vector>

namespace fsdp::testing {

/// Sizes of the axes; a row holds one index per axis.
using Axes = std::vector<std::size_t>;
using TableRow = std::vector<std::size_t>;
using Table = std::vector<TableRow>;

inline Table all_rows(Axes const& axes) {
  Table rows{{}};
  for (auto const size : axes) {
    Table longer;
    for (auto const& row : rows) {
      for (std::size_t value = 0; value < size; ++value) {
        longer.push_back(row);
        longer.back().push_back(value);
      }
    }
    rows = std::move(longer);
  }
  return rows;
}

/// (axis, value, later axis, value).
struct ValuePair {
  std::size_t axis, value, other_axis, other_value;
  friend auto operator<=>(ValuePair const&, ValuePair const&) = default;
};

inline std::set<ValuePair> pairs_of(TableRow const& row) {
  std::set<ValuePair> pairs;
  for (std::size_t a = 0; a < row.size(); ++a)
    for (std::size_t b = a + 1; b < row.size(); ++b) pairs.insert({a, row[a], b, row[b]});
  return pairs;
}

/// Rows of all_rows(axes), taken greedily: each is the one (the first, where several are equal) with the most pairs of
/// values that no earlier row has, until every pair is there.
inline Table all_pairs(Axes const& axes) {
  auto const candidates = all_rows(axes);
  std::set<ValuePair> missing;
  for (auto const& row : candidates) missing.merge(pairs_of(row));
  Table chosen;
  while (!missing.empty()) {
    TableRow const* best = nullptr;
    std::size_t most = 0;
    for (auto const& row : candidates) {
      std::size_t found = 0;
      for (auto const& pair : pairs_of(row)) found += missing.count(pair);
      if (found > most) {
        most = found;
        best = &row;
      }
    }
    for (auto const& pair : pairs_of(*best)) missing.erase(pair);
    chosen.push_back(*best);
  }
  return chosen;
}

}  // namespace fsdp::testing
