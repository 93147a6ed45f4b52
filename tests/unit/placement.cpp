// SPDX-License-Identifier: Apache-2.0
// skip-tsan
// Between nodes each slice and each partial sum crosses once a node, and sums keep the tree of all ranks.
#include "fsdp/detail/mpi/placement.hpp"

#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/catch.hpp"

namespace {

using fsdp::mpi::detail::Placement;

/// The pairwise tree over ranks [begin, end) in words: adjacent values are added, and an odd one is carried up.
std::string tree(int begin, int end) {
  std::vector<std::string> values;
  for (int rank = begin; rank < end; ++rank) values.push_back(std::to_string(rank));
  while (values.size() > 1) {
    std::vector<std::string> sums;
    for (std::size_t i = 0; i + 1 < values.size(); i += 2) sums.push_back("(" + values[i] + "+" + values[i + 1] + ")");
    if (values.size() % 2 != 0) sums.push_back(values.back());
    values = sums;
  }
  return values.front();
}

/// The sum that the placement's steps make of its pieces.
std::string sum_of_pieces(Placement const& places) {
  std::vector<std::string> stack;
  for (auto const step : places.steps()) {
    if (step != Placement::add) {
      auto const& piece = places.pieces()[static_cast<std::size_t>(step)];
      stack.push_back(tree(piece.first, piece.first + piece.ranks));
      continue;
    }
    auto const right = stack.back();
    stack.pop_back();
    stack.back() = "(" + stack.back() + "+" + right + ")";
  }
  return stack.size() == 1 ? stack.front() : "several values";
}

std::vector<int> piece_sizes(std::vector<int> const& nodes) {
  std::vector<int> sizes;
  Placement const places(nodes, 0);
  for (auto const& piece : places.pieces()) sizes.push_back(piece.ranks);
  return sizes;
}

/// Everything that holds of any placement.
void check_all(std::vector<int> const& nodes) {
  int const size = static_cast<int>(nodes.size());
  std::map<std::pair<int, int>, int> crossings;  // of a rank's slice to a node
  for (int self = 0; self < size; ++self) {
    Placement const places(nodes, self);
    REQUIRE(places.size() == size);
    CHECK(sum_of_pieces(places) == tree(0, size));
    int next = 0;
    for (auto const& piece : places.pieces()) {
      CHECK(piece.first == next);
      next += piece.ranks;
      for (int rank = piece.first; rank < next; ++rank) CHECK(places.node_of(rank) == piece.node);
    }
    CHECK(next == size);
    CHECK(places.carried().size() <= places.most_carried());
    for (std::size_t i = 0; i < places.carried().size(); ++i) {
      auto const rank = places.carried()[i];
      CHECK(nodes[static_cast<std::size_t>(rank)] != nodes[static_cast<std::size_t>(self)]);
      CHECK(places.carrier(places.own_node(), rank) == self);
      CHECK(places.slot(rank) == i);
      ++crossings[{rank, places.own_node()}];
    }
  }
  Placement const places(nodes, 0);
  for (int rank = 0; rank < size; ++rank)
    for (int node = 0; node < places.nodes(); ++node)
      CHECK(crossings[{rank, node}] == (places.node_of(rank) == node ? 0 : 1));
}

}  // namespace

TEST_CASE("a slice crosses to each other node once, and sums have the tree of all ranks, wherever ranks are") {
  std::mt19937 generator(1);
  auto const draws = [&](unsigned below) { return generator() % below; };
  for (int ranks = 1; ranks <= 17; ++ranks) {
    for (int round = 0; round < 20; ++round) {
      std::vector<int> nodes;  // consecutive ranks, or any
      bool const any = draws(2) == 0;
      int node = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        if (draws(3) == 0) ++node;
        nodes.push_back(any ? static_cast<int>(draws(4)) : node);
      }
      check_all(nodes);
    }
  }
}

TEST_CASE("a node's ranks are added there as far as they are a subtree") {
  CHECK(piece_sizes({0, 0, 1, 1}) == std::vector{2, 2});
  CHECK(piece_sizes({0, 0, 0, 1}) == std::vector{2, 1, 1});
  CHECK(piece_sizes({0, 1, 2, 2}) == std::vector{1, 1, 2});
  CHECK(piece_sizes({0, 1, 1, 0}) == std::vector{1, 1, 1, 1});
  CHECK(piece_sizes({0, 0, 0, 0, 1, 1, 1}) == std::vector{4, 3});  // the last subtree is short
  CHECK(piece_sizes({0, 0, 0, 1, 1, 1}) == std::vector{2, 1, 1, 2});
  CHECK(piece_sizes({0, 0, 0, 0}) == std::vector{4});
  CHECK_FALSE(Placement({0, 0, 0, 0}, 0).has_partial_sums());
  CHECK_FALSE(Placement({0, 1, 2, 3}, 0).has_partial_sums());
  CHECK(Placement({0, 0, 1, 1}, 0).has_partial_sums());
}

TEST_CASE("ranks of equal nodes carry equally much") {
  for (int const nodes : {2, 3, 4})
    for (int const each : {1, 2, 4, 8}) {
      std::vector<int> node_of;
      for (int rank = 0; rank < nodes * each; ++rank) node_of.push_back(rank / each);
      for (int self = 0; self < nodes * each; ++self)
        CHECK(Placement(node_of, self).carried().size() == static_cast<std::size_t>(nodes - 1));
    }
}
