// SPDX-License-Identifier: Apache-2.0
// The strategies that a grid of a test runs.
#pragma once

#include <cstddef>
#include <vector>

#include "fsdp/strategy.hpp"
#include "tests/support/sanitized.hpp"

namespace fsdp::testing {

/// Strategies for a number of ranks; under a sanitizer, all of them on 2 ranks alone.
inline std::vector<ShardingStrategy> strategies(int ranks) {
  if (sanitized && ranks == 4) return {HybridShard<FullShard>{2}};
  if (sanitized && ranks != 2) return {FullShard{}};
  std::vector<ShardingStrategy> all{FullShard{}, ShardGradOp{}, NoShard{}};
  if (ranks == 4) all.push_back(HybridShard<FullShard>{2});
  return all;
}
/// Some of them, for a cell of a grid whose rows are numbers of ranks: one of the three that any number of ranks has,
/// in turn, and all groups. With three rows and three columns or more, each row and each column has every strategy.
inline std::vector<ShardingStrategy> strategies_in_turn(int ranks, int row, int column) {
  auto all = strategies(ranks);
  if (sanitized) return all;
  std::vector<ShardingStrategy> some(all.begin() + 3, all.end());
  some.push_back(all[static_cast<std::size_t>(row + 2 * column) % 3]);
  return some;
}
/// And groups that keep parameters between forward and backward.
inline std::vector<ShardingStrategy> strategies_and_groups(int ranks) {
  auto all = strategies(ranks);
  if (ranks == 4 && !sanitized) all.push_back(HybridShard<ShardGradOp>{2});
  return all;
}

}  // namespace fsdp::testing
