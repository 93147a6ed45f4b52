// SPDX-License-Identifier: Apache-2.0
// Placement of a rank in the world, in its shard group, and among the replicas. Pure arithmetic. Pure arithmetic.
#pragma once

#include "fsdp/error.hpp"
#include "fsdp/strategy.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// Rank w of W is member `shard` of the N ranks of shard group `replica` of R. Shard groups are consecutive ranks;
/// replicas are the ranks of equal place in each.
struct Placement {
  int rank = 0, world = 1;
  int shard = 0, shards = 1;
  int replica = 0, replicas = 1;

  /// The rank's placement for memory that every rank keeps whole.
  Placement replicated() const { return {rank, world, 0, 1, rank, world}; }
};

/// The placement of `rank` of `world` under a strategy.
/// @throws ConfigError if the strategy's groups do not divide the world, or it does not set them
inline Placement place(int rank, int world, ShardingStrategy const& strategy) {
  if (strategy.grouped && strategy.group == 0)
    fail<ConfigError>("rank {}: {}: set HybridShard::group to the number of ranks per shard group", rank,
                      strategy.name);
  if (strategy.grouped && (strategy.group < 0 || world % strategy.group != 0))
    fail<ConfigError>("rank {}: {}: a shard group of {} ranks does not divide the world of {}", rank, strategy.name,
                      strategy.group, world);
  auto const shards = strategy.grouped ? strategy.group : strategy.shards ? world : 1;
  return {rank, world, rank % shards, shards, rank / shards, world / shards};
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
