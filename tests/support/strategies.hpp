// SPDX-License-Identifier: Apache-2.0
// The strategies that a grid of a test runs.
#pragma once

#include <vector>

#include "fsdp/strategy.hpp"
#include "tests/support/sanitized.hpp"

namespace fsdp::testing {

/// Those of a number of ranks; under a sanitizer, all of them on 2 ranks alone.
inline std::vector<ShardingStrategy> strategies(int ranks) {
  if (sanitized && ranks == 4) return {HybridShard<FullShard>{2}};
  if (sanitized && ranks != 2) return {FullShard{}};
  std::vector<ShardingStrategy> all{FullShard{}, ShardGradOp{}, NoShard{}};
  if (ranks == 4) all.push_back(HybridShard<FullShard>{2});
  return all;
}
/// And groups that keep parameters between forward and backward.
inline std::vector<ShardingStrategy> strategies_and_groups(int ranks) {
  auto all = strategies(ranks);
  if (ranks == 4 && !sanitized) all.push_back(HybridShard<ShardGradOp>{2});
  return all;
}

}  // namespace fsdp::testing
