// SPDX-License-Identifier: Apache-2.0
// The strategy of a test that runs every one with one description.
#pragma once

#include "fsdp/strategy.hpp"

namespace fsdp::testing {

/// The strategy with shard groups of `ranks`, if it has groups.
constexpr ShardingStrategy in_groups_of(int ranks, ShardingStrategy strategy) {
  if (strategy.grouped) strategy.group = ranks;
  return strategy;
}

}  // namespace fsdp::testing
