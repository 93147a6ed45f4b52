// SPDX-License-Identifier: Apache-2.0
// HybridShard shards inside a group: NoShard inside is a contradiction.
// expect: HybridShard shards inside a group
#include "fsdp/strategy.hpp"

#ifdef CONTROL
using Inner = fsdp::ShardGradOp;
#else
using Inner = fsdp::NoShard;
#endif
static_assert(fsdp::HybridShard<Inner>::shards);
