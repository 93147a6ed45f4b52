// SPDX-License-Identifier: Apache-2.0
// What an engine is told besides its types.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fsdp {

struct EngineOptions {
  int prefetch = 1;                   ///< units gathered ahead of the one that computes
  bool keep_last = true;              ///< keep the last pooled unit from forward into backward
  bool keep_root = true;              ///< keep a unit of several uses from its first forward use to its last backward
  bool accumulate_unsharded = false;  ///< gradient slots for every unit, so that micro-steps need not reduce
  std::int64_t bucket_bytes = 25 << 20;       ///< NoShard: bytes per all-reduce
  std::int64_t first_bucket_bytes = 1 << 20;  ///< NoShard: bytes of the first all-reduce of a backward pass
  std::uint64_t seed = 1337;                  ///< of the initial parameters
};

/// Names a unit that several modules share.
struct UnitId {
  std::size_t index = 0;
};

}  // namespace fsdp
