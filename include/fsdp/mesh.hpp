// SPDX-License-Identifier: Apache-2.0
// The communicators of a run: world, shard group, replicate group.
#pragma once

#include <utility>

#include "fsdp/concepts.hpp"
#include "fsdp/error.hpp"

namespace fsdp {

struct MeshOptions {
  int shard_group = 0;  ///< ranks per shard group of HybridShard, a divisor of the world; 0: not set
};

/// The world of ranks, and how it divides: shard groups are consecutive ranks, replicate groups hold the ranks of equal
/// place in each.
template <Communicator C>
class Mesh {
 public:
  using Comm = C;

  /// @throws ConfigError if shard_group does not divide the world's size
  explicit Mesh(C world, MeshOptions options = {}) : world_(std::move(world)), options_(options) {
    if (options.shard_group < 0 || (options.shard_group > 0 && world_.size() % options.shard_group != 0))
      fail<ConfigError>("rank {}: a shard group of {} ranks does not divide the world of {}", world_.rank(),
                        options.shard_group, world_.size());
  }

  template <class None = void>
  Mesh(C, ...) = delete;  // fsdp: not MeshOptions: is a name misspelt, or out of order?

  C& world() { return world_; }
  int rank() const { return world_.rank(); }
  int size() const { return world_.size(); }
  typename C::Device const& device() const { return world_.device(); }

  /// Ranks that share one set of shards under strategy `S`.
  /// @throws ConfigError if `S` needs shard groups and none are given, or has none and they are
  template <Strategy S>
  int shard_ranks() const {
    bool const grouped = S::shards_parameters && S::replicates;
    if (!grouped && options_.shard_group != 0)
      fail<ConfigError>("rank {}: MeshOptions::shard_group is {}, but {} has no shard groups: they are for HybridShard",
                        rank(), options_.shard_group, S::name);
    if (!grouped) return S::shards_parameters ? size() : 1;
    if (options_.shard_group == 0)
      fail<ConfigError>("rank {}: {} needs the ranks per shard group (MeshOptions::shard_group)", rank(), S::name);
    return options_.shard_group;
  }

 private:
  C world_;
  MeshOptions options_;
};
template <class C>
Mesh(C) -> Mesh<C>;

}  // namespace fsdp
