// SPDX-License-Identifier: Apache-2.0
// What an engine is told besides its types.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "fsdp/tensor.hpp"

namespace fsdp {

struct EngineOptions {
  int prefetch = 1;                        ///< units gathered ahead of the one that computes
  std::optional<int> backward_prefetch{};  ///< the same in backward; not set: `prefetch`
  std::int64_t max_ahead_bytes = 0;        ///< cap on the bytes of units gathered ahead of their use; 0: none
  bool keep_last = true;                   ///< keep the last pooled unit from forward into backward
  /// Keep a unit that is used again after others, a tied root say, from its first forward use to its last backward one.
  bool keep_root = true;
  /// After forward, units stay sharded over so many consecutive ranks, and backward gathers among those alone: more
  /// than 1, fewer than the shard group, a divisor of it. 0: as the strategy says.
  int reshard_ranks = 0;
  // What scopes of the same names need:
  bool keep_unsharded = false;   ///< parameters may stay between micro-steps: a gather buffer for every unit
  bool no_sync = false;          ///< gradients may wait unreduced: memory for all that several ranks share
  bool no_replica_sync = false;  ///< HybridShard: sums within shard groups may wait for replicas: one more shard, fp32
  std::int64_t bucket_bytes = 25 << 20;       ///< NoShard: bytes per all-reduce
  std::int64_t first_bucket_bytes = 1 << 20;  ///< NoShard: bytes of the first all-reduce of a backward pass
  int passes_ahead = 4;       ///< passes over the modules that the host may be ahead of compute; at least 1
  std::uint64_t seed = 1337;  ///< of the initial parameters
  /// The type that ranks sum gradients in. Not set: the one that backward writes (Precision's Reduce). Where that is
  /// fp32, bf16 or fp16 as well: each rank's gradients are rounded once on their way to the sum.
  std::optional<DType> reduce_dtype{};
};

/// Names a unit that several modules share.
struct UnitId {
  std::size_t index = 0;
};
/// Names a module's turn in the declared order: ShardedModule and AdoptedUnit convert to it.
struct UseId {
  std::size_t index = 0;
};

}  // namespace fsdp
