// SPDX-License-Identifier: Apache-2.0
// HybridShard does not nest.
// expect: HybridShard shards inside a group
#include "fsdp/strategy.hpp"

#ifdef CONTROL
static_assert(fsdp::HybridShard<fsdp::FullShard>::shards);
#else
static_assert(fsdp::HybridShard<fsdp::HybridShard<fsdp::FullShard>>::shards);
#endif
