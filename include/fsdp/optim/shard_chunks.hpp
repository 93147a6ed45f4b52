// SPDX-License-Identifier: Apache-2.0
// A shard cut by tensor into the pieces that one optimizer launch walks, with each tensor's own weight decay.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "fsdp/elementwise.hpp"
#include "fsdp/engine.hpp"

namespace fsdp {

/// One unit's optimizer chunks in device memory.
template <class E>
class ShardChunks {
 public:
  static constexpr std::int64_t chunk_elements = 16 * 1024;

  /// @note Waits for compute once, while the chunk list is copied.
  ShardChunks(E& engine, typename E::Unit const& unit, float weight_decay) {
    std::vector<OptimizerChunk> chunks;
    for (auto const& part : unit.layout().segments(unit.shard())) {
      float const decay = unit.layout().tensors()[part.tensor].decay ? weight_decay : 0.0f;
      for (std::int64_t done = 0; done < part.count; done += chunk_elements)
        chunks.push_back(
            {part.offset + done, static_cast<std::int32_t>(std::min(chunk_elements, part.count - done)), decay});
    }
    count_ = static_cast<std::int64_t>(chunks.size());
    memory_ = {engine.device(), engine.account(), MemoryTag::scalars, chunks.size() * sizeof(OptimizerChunk)};
    engine.device().copy_async(engine.compute(), memory_.data(), chunks.data(), memory_.bytes());
    engine.device().synchronize(engine.compute());
  }

  OptimizerChunk const* data() const { return memory_.template as<OptimizerChunk const>(); }
  std::int64_t count() const { return count_; }

 private:
  AccountedMemory<typename E::Device const> memory_;
  std::int64_t count_ = 0;
};

}  // namespace fsdp
