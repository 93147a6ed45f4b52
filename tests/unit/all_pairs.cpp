// SPDX-License-Identifier: Apache-2.0
// The generator of reduced test tables leaves out no pair of values.
// skip-sanitizers
#include "tests/support/all_pairs.hpp"

#include <algorithm>

#include "tests/catch.hpp"

using namespace fsdp::testing;

TEST_CASE("every pair of values of any two axes is in the reduced table") {
  for (Axes const& axes : {Axes{4, 3, 3, 3, 2}, Axes{2, 2}, Axes{5}, Axes{1, 3, 2}, Axes{4, 4, 4}}) {
    auto const table = all_pairs(axes);
    for (std::size_t a = 0; a < axes.size(); ++a) {
      for (std::size_t b = a + 1; b < axes.size(); ++b) {
        for (std::size_t i = 0; i < axes[a]; ++i) {
          for (std::size_t j = 0; j < axes[b]; ++j) {
            INFO("axes " << a << " and " << b << ", values " << i << " and " << j);
            CHECK(std::any_of(table.begin(), table.end(), [&](auto const& row) { return row[a] == i && row[b] == j; }));
          }
        }
      }
    }
    for (auto const& row : table)
      for (std::size_t a = 0; a < axes.size(); ++a) CHECK(row[a] < axes[a]);
  }
}

TEST_CASE("the reduced table is small, and the same every time") {
  Axes const axes{4, 3, 3, 3, 2};
  CHECK(all_rows(axes).size() == 216);
  auto const table = all_pairs(axes);
  CHECK(table.size() >= 12);  // the two largest axes alone
  CHECK(table.size() <= 18);
  CHECK(all_pairs(axes) == table);
}
