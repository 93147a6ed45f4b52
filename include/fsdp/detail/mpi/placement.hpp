// SPDX-License-Identifier: Apache-2.0
// Nodes of a communicator's ranks, and the ranks that carry data between nodes. Arithmetic only.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "fsdp/version.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::mpi::detail {

/// The nodes of a communicator's ranks, as one rank sees them. Equal on all ranks but for `self`.
///
/// [Note: One crossing a node] What a rank has for a node crosses to it once, to one rank there, its carrier; the
/// node's other ranks read that in shared memory. What a node has for a rank crosses once, too, where it is a sum: the
/// carrier adds what its node's ranks have, and sends the partial sum. The order of additions is that of one tree over
/// all ranks (pairwise.hpp), so ranks are added on their node only as far as they are a subtree of it: a piece. Ranks 0
/// and 1 of four are one, ranks 1 and 2 are none and cross by themselves. Consecutive ranks of nodes with 2, 4 or 8
/// ranks each are one piece a node.
class Placement {
 public:
  /// A largest subtree of the tree over ranks that lies on one node: ranks [first, first + ranks).
  struct Piece {
    int first;
    int ranks;
    int node;
  };
  static constexpr int add = -1;  ///< in steps()

  Placement() = default;
  /// @param node_of  for each rank, a number that the ranks of its node have in common
  Placement(std::vector<int> const& node_of, int self) : self_(self) {
    std::vector<int> numbers;
    for (std::size_t rank = 0; rank < node_of.size(); ++rank) {
      auto const found = std::find(numbers.begin(), numbers.end(), node_of[rank]);
      auto const node = static_cast<std::size_t>(found - numbers.begin());
      if (found == numbers.end()) {
        numbers.push_back(node_of[rank]);
        members_.emplace_back();
      }
      node_of_.push_back(static_cast<int>(node));
      place_of_.push_back(static_cast<int>(members_[node].size()));
      members_[node].push_back(static_cast<int>(rank));
    }
    int span = 1;
    while (span < size()) span *= 2;
    divide(0, span);
    slots_.resize(node_of_.size());
    for (int node = 0; node < nodes(); ++node) {
      std::vector<std::size_t> carried(members(node).size());
      for (int rank = 0; rank < size(); ++rank) {
        if (node_of_[at(rank)] == node) continue;
        auto& of_carrier = carried[at(place_of_[at(carrier(node, rank))])];
        if (node == own_node()) {
          slots_[at(rank)] = of_carrier;
          if (carrier(node, rank) == self_) carried_.push_back(rank);
        }
        most_carried_ = std::max(most_carried_, ++of_carrier);
      }
    }
  }

  int size() const { return static_cast<int>(node_of_.size()); }
  int nodes() const { return static_cast<int>(members_.size()); }
  int own_node() const { return node_of_[at(self_)]; }
  int node_of(int rank) const { return node_of_[at(rank)]; }
  /// Ranks of a node, ascending. Nodes are numbered by their first ranks.
  std::vector<int> const& members(int node) const { return members_[at(node)]; }
  int leader(int node) const { return members(node).front(); }
  bool leads() const { return leader(own_node()) == self_; }

  /// The rank of `node` that receives what `rank`, of another node, has for the node; and that sends to `rank` what the
  /// node has for it. Ranks of equal nodes have one carrier each.
  int carrier(int node, int rank) const {
    auto const& there = members(node);
    return there[at(place_of_[at(rank)] + node_of_[at(rank)]) % there.size()];
  }
  std::vector<int> const& carried() const { return carried_; }  ///< ranks whose carrier on its node this rank is
  /// The place of `rank`, of another node, among the carried() of its carrier on this node.
  std::size_t slot(int rank) const { return slots_[at(rank)]; }
  std::size_t most_carried() const { return most_carried_; }  ///< by any rank

  /// The tree over ranks: its pieces, in the order of ranks, and how they are added. A step puts the piece of that
  /// index on a stack, or adds the two uppermost values.
  std::vector<Piece> const& pieces() const { return pieces_; }
  std::vector<int> const& steps() const { return steps_; }
  /// Whether a node has a piece of several ranks, whose partial sum it sends to other nodes.
  bool has_partial_sums() const {
    return nodes() > 1 && std::any_of(pieces_.begin(), pieces_.end(), [](Piece const& p) { return p.ranks > 1; });
  }

 private:
  static std::size_t at(int index) { return static_cast<std::size_t>(index); }

  void divide(int begin, int span) {
    int const end = std::min(size(), begin + span), half = span / 2;
    auto const first = node_of_.begin() + begin, last = node_of_.begin() + end;
    if (std::all_of(first, last, [&](int node) { return node == *first; })) {
      steps_.push_back(static_cast<int>(pieces_.size()));
      pieces_.push_back({begin, end - begin, *first});
      return;
    }
    divide(begin, half);
    if (begin + half >= end) return;
    divide(begin + half, half);
    steps_.push_back(add);
  }

  int self_ = 0;
  std::vector<int> node_of_, place_of_;
  std::vector<std::vector<int>> members_;
  std::vector<int> carried_;
  std::vector<std::size_t> slots_;
  std::size_t most_carried_ = 0;
  std::vector<Piece> pieces_;
  std::vector<int> steps_;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::mpi::detail
