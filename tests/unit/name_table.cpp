// SPDX-License-Identifier: Apache-2.0
// A name table finds the entries that a linear search finds, while entries are added and removed at the end.
// skip-tsan
#include <cstddef>
#include <random>
#include <string>
#include <vector>

#include "fsdp/layout.hpp"
#include "tests/catch.hpp"

using fsdp::detail::NameTable;

TEST_CASE("a name table finds the last entry of each name, after every change") {
  std::mt19937 random(3);
  for (int trial = 0; trial < 200; ++trial) {
    auto const kinds = 1 + random() % 60;
    auto const any_name = [&] { return "n" + std::to_string(random() % kinds); };
    std::vector<std::string> names;
    NameTable table;
    auto const expected = [&](std::string const& name) {
      for (auto i = names.size(); i-- > 0;)
        if (names[i] == name) return i;
      return NameTable::none;
    };
    for (int change = 0; change < 60; ++change) {
      if (random() % 5 == 0) {
        auto const count = random() % (names.size() + 1);
        names.resize(count);
        table.truncate(count);
      } else {
        names.push_back(any_name());
        table.reserve();
        table.add(names.back());
      }
      REQUIRE(table.size() == names.size());
      for (int look = 0; look < 4; ++look) {
        auto const name = any_name();
        REQUIRE(table.find(name, [&](std::size_t i) { return names[i] == name; }) == expected(name));
      }
    }
  }
}

TEST_CASE("a name table offers every entry of a name until one is taken, the last one first") {
  NameTable table;
  std::vector<std::size_t> offered;
  for (int i = 0; i < 40; ++i) {
    table.reserve();
    table.add(i % 10 == 0 ? "tied" : "other" + std::to_string(i));
  }
  REQUIRE(table.find("tied", [&](std::size_t i) {
    offered.push_back(i);
    return i == 10;
  }) == 10);
  REQUIRE(offered == std::vector<std::size_t>{30, 20, 10});
}

TEST_CASE("an empty name table finds nothing, and an empty name is a name") {
  NameTable table;
  auto const any = [](std::size_t) { return true; };
  REQUIRE(table.find("", any) == NameTable::none);
  table.reserve();
  table.add("");
  REQUIRE(table.find("", any) == 0);
  REQUIRE(table.find("a", any) == NameTable::none);
}
