// SPDX-License-Identifier: Apache-2.0
// The sharding strategies: empty types with constexpr answers.
#pragma once

#include <string_view>

namespace fsdp {

/// Shards parameters, gradients and optimizer state; gathers a unit for its forward and again for its backward
/// (ZeRO-3; PyTorch's FULL_SHARD).
struct FullShard {
  static constexpr bool shards_parameters = true;       ///< false: every rank keeps all parameters
  static constexpr bool reshards_after_forward = true;  ///< false: unsharded from forward until after backward
  static constexpr bool shards_gradients = true;        ///< false: every rank keeps all gradients
  static constexpr bool replicates = false;             ///< true: gradients are all-reduced over replicas as well
  static constexpr std::string_view name = "full_shard";
};

/// Shards gradients and optimizer state; parameters stay unsharded from forward until after backward
/// (ZeRO-2; PyTorch's SHARD_GRAD_OP).
struct ShardGradOp {
  static constexpr bool shards_parameters = true;
  static constexpr bool reshards_after_forward = false;
  static constexpr bool shards_gradients = true;
  static constexpr bool replicates = false;
  static constexpr std::string_view name = "shard_grad_op";
};

/// `Inner` within shard groups of consecutive ranks, replicated over the groups (PyTorch's HYBRID_SHARD).
template <class Inner = FullShard>
struct HybridShard {
  static_assert(Inner::shards_parameters && !Inner::replicates,
                "HybridShard shards inside a group: FullShard or ShardGradOp");
  static constexpr bool shards_parameters = true;
  static constexpr bool reshards_after_forward = Inner::reshards_after_forward;
  static constexpr bool shards_gradients = true;
  static constexpr bool replicates = true;
  static constexpr std::string_view name = "hybrid_shard";
};

/// Every rank keeps everything; gradients are all-reduced in buckets (PyTorch's NO_SHARD, and DDP).
struct NoShard {
  static constexpr bool shards_parameters = false;
  static constexpr bool reshards_after_forward = false;
  static constexpr bool shards_gradients = false;
  static constexpr bool replicates = true;
  static constexpr std::string_view name = "no_shard";
};
using DDP = NoShard;

}  // namespace fsdp
