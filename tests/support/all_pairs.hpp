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

/// Rows that hold every pair of values of two axes. Each begins with the first pair that no earlier row has; every
/// other axis then takes, in turn, the value that makes most of such pairs with the row so far (the first one from the
/// row's number on, where several are equal).
inline Table all_pairs(Axes const& axes) {
  std::set<ValuePair> missing;
  for (std::size_t a = 0; a < axes.size(); ++a)
    for (std::size_t b = a + 1; b < axes.size(); ++b)
      for (std::size_t i = 0; i < axes[a]; ++i)
        for (std::size_t j = 0; j < axes[b]; ++j) missing.insert({a, i, b, j});
  Table chosen;
  while (!missing.empty()) {
    auto const seed = *missing.begin();
    TableRow row(axes.size());
    std::vector<bool> set(axes.size(), false);
    row[seed.axis] = seed.value, set[seed.axis] = true;
    row[seed.other_axis] = seed.other_value, set[seed.other_axis] = true;
    for (std::size_t axis = 0; axis < axes.size(); ++axis) {
      if (set[axis]) continue;
      std::size_t most = 0;
      row[axis] = chosen.size() % axes[axis];
      for (std::size_t i = 0; i < axes[axis]; ++i) {
        auto const value = (chosen.size() + i) % axes[axis];
        std::size_t found = 0;
        for (std::size_t other = 0; other < axes.size(); ++other) {
          if (!set[other]) continue;
          found += other < axis ? missing.count({other, row[other], axis, value})
                                : missing.count({axis, value, other, row[other]});
        }
        if (found > most) most = found, row[axis] = value;
      }
      set[axis] = true;
    }
    for (auto const& pair : pairs_of(row)) missing.erase(pair);
    chosen.push_back(std::move(row));
  }
  return chosen;
}

}  // namespace fsdp::testing
