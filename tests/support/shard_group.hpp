// SPDX-License-Identifier: Apache-2.0
// The mesh of a test that runs every strategy with one description.
#pragma once

#include "fsdp/mesh.hpp"

namespace fsdp::testing {

/// Shard groups of `ranks` where strategy `S` has groups: elsewhere they would be refused.
template <Strategy S>
constexpr MeshOptions groups_of(int ranks) {
  return {.shard_group = S::shards_parameters && S::replicates ? ranks : 0};
}

}  // namespace fsdp::testing
