// SPDX-License-Identifier: Apache-2.0
// The sharding strategies: empty types with constexpr answers.
#pragma once

#include <algorithm>
#include <array>
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

namespace detail {
/// "hybrid_shard(inner)", for messages and for the comparison over ranks.
template <class Inner>
struct HybridName {
  static constexpr std::string_view before = "hybrid_shard(";
  static constexpr auto characters = [] {
    std::array<char, before.size() + std::string_view(Inner::name).size() + 1> text{};
    auto* end = std::copy(before.begin(), before.end(), text.data());
    end = std::copy_n(std::string_view(Inner::name).data(), std::string_view(Inner::name).size(), end);
    *end = ')';
    return text;
  }();
  static constexpr std::string_view value{characters.data(), characters.size()};
};
}  // namespace detail

/// `Inner` within shard groups of consecutive ranks, replicated over the groups (PyTorch's HYBRID_SHARD).
template <class Inner = FullShard>
struct HybridShard {
  static_assert(Inner::shards_parameters && !Inner::replicates,
                "HybridShard shards inside a group: FullShard or ShardGradOp");
  static constexpr bool shards_parameters = true;
  static constexpr bool reshards_after_forward = Inner::reshards_after_forward;
  static constexpr bool shards_gradients = true;
  static constexpr bool replicates = true;
  static constexpr std::string_view name = detail::HybridName<Inner>::value;
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
