// SPDX-License-Identifier: Apache-2.0
// Sharding strategies, ShardingStrategy, the value that any of them converts to, and the placement of a rank under
// it.
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <string_view>

#include "fsdp/concepts.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// Shards parameters, gradients and optimizer state; gathers a unit for its forward and again for its backward
/// (ZeRO-3; PyTorch's FULL_SHARD).
struct FullShard {
  static constexpr std::string_view name = "full_shard";  ///< for messages; compared over ranks
  static constexpr bool shards = true;  ///< false: every rank keeps everything; read by UnitPlan::describe
  /// false: unsharded from forward until after backward. Read by UnitPlan::own_gather_slot and keeps_after_forward.
  static constexpr bool reshards_after_forward = true;
};

/// Shards gradients and optimizer state; parameters stay unsharded from forward until after backward
/// (ZeRO-2; PyTorch's SHARD_GRAD_OP).
struct ShardGradOp {
  static constexpr std::string_view name = "shard_grad_op";  ///< for messages; compared over ranks
  static constexpr bool shards = true;                       ///< each rank keeps only its shard
  static constexpr bool reshards_after_forward = false;      ///< parameters stay unsharded until after backward
};

namespace detail {
/// "hybrid_shard(inner)", for messages and for the comparison over ranks.
template <class Inner>
struct HybridName {
  static constexpr std::string_view before = "hybrid_shard(";
  static constexpr auto characters = [] {
    std::array<char, before.size() + std::string_view(Inner::name).size() + 1> text{};
    auto* end = std::copy(before.begin(), before.end(), text.data());
    end = std::copy(std::string_view(Inner::name).begin(), std::string_view(Inner::name).end(), end);
    *end = ')';
    return text;
  }();
  static constexpr std::string_view value{characters.data(), characters.size()};
};

/// The strategy shards within groups of ranks, and replicates over the groups.
template <class S>
concept Grouped = requires(S const& strategy) {
  { strategy.group } -> std::convertible_to<int>;
};
}  // namespace detail

/// `Inner` within shard groups of consecutive ranks, replicated over the groups (PyTorch's HYBRID_SHARD).
template <class Inner = FullShard>
struct HybridShard {
  static_assert(Inner::shards && !detail::Grouped<Inner>,
                "HybridShard shards inside a group: FullShard or ShardGradOp");
  static constexpr std::string_view name = detail::HybridName<Inner>::value;     ///< for messages: hybrid_shard(inner)
  static constexpr bool shards = true;                                           ///< over the ranks of a group
  static constexpr bool reshards_after_forward = Inner::reshards_after_forward;  ///< as Inner; false for ShardGradOp
  int group = 0;  ///< ranks that share one set of shards, a divisor of the world
};

/// Every rank keeps everything; gradients are all-reduced in buckets (PyTorch's NO_SHARD, and DDP).
struct NoShard {
  static constexpr std::string_view name = "no_shard";   ///< for messages; compared over ranks
  static constexpr bool shards = false;                  ///< every rank keeps everything
  static constexpr bool reshards_after_forward = false;  ///< parameters stay whole on every rank
};
using DDP = NoShard;  ///< NoShard, by PyTorch's name

/// A strategy as a value: the argument of engines and units, and the type for a setting that is read at run time. Any
/// Strategy converts to it.
struct ShardingStrategy {
  std::string_view name;        ///< for messages; compared over ranks
  bool shards;                  ///< false: every rank keeps everything
  bool reshards_after_forward;  ///< false: unsharded from forward until after backward
  bool grouped = false;         ///< shards within groups of `group` ranks, and sums gradients over the groups
  int group = 0;                ///< 0: not said

  /// Copies the members of `strategy`; `grouped` is whether it has a member `group`.
  template <Strategy S>
  requires(!std::same_as<S, ShardingStrategy>) constexpr ShardingStrategy(
      S const& strategy)  // NOLINT: a strategy is one
      : name(S::name), shards(strategy.shards), reshards_after_forward(strategy.reshards_after_forward) {
    if constexpr (detail::Grouped<S>) {
      grouped = true;
      group = strategy.group;
    }
  }
  /// Whether all members are equal.
  friend constexpr bool operator==(ShardingStrategy const&, ShardingStrategy const&) = default;
};

/// Rank w of W is member `shard` of the N ranks of shard group `replica` of R. Shard groups are consecutive ranks;
/// replicas are the ranks of equal place in each.
struct Placement {
  int rank = 0,      ///< this rank, in [0, world)
      world = 1;     ///< number of ranks
  int shard = 0,     ///< its shard, in [0, shards)
      shards = 1;    ///< number of shards: the ranks of a shard group
  int replica = 0,   ///< its shard group, in [0, replicas)
      replicas = 1;  ///< number of shard groups

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
