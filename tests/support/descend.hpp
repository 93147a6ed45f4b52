// SPDX-License-Identifier: Apache-2.0
// Gradient descent that leaves some units out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "fsdp/fsdp.hpp"

namespace fsdp::testing {

/// master -= rate * gradient.
struct Descend {
  template <class Block>
  FSDP_HD void operator()(Block const& block, std::int64_t, float* master, float const* gradient, std::int64_t count,
                          float rate) const {
    for (std::int64_t i = block.thread(); i < count; i += block.threads()) master[i] -= rate * gradient[i];
  }
};

/// A step over all units that train. @param left_out  by unit: it stays as it is
template <class E>
void descend(E& engine, std::vector<bool> const& left_out, float rate) {
  auto const shards = engine.shards();
  shards.begin_step("descend", rate);
  for (std::size_t u = 0; u < shards.size(); ++u) {
    auto& unit = shards[u];
    if (!unit.trains()) continue;
    auto const update = shards.update(unit);
    if (!left_out[u])
      engine.device().launch(engine.compute(), 1, Descend{}, unit.master, static_cast<float const*>(unit.gradient),
                             unit.shard_numel(), rate);
  }
}

}  // namespace fsdp::testing
