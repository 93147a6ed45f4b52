// SPDX-License-Identifier: Apache-2.0
// Stochastic gradient descent on flat shards.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "fsdp/engine.hpp"
#include "fsdp/optim/shard_chunks.hpp"

namespace fsdp {

struct SgdOptions {
  float lr = 1e-2f;
  float momentum = 0.0f;      ///< 0: no momentum, and no memory for it
  float weight_decay = 0.0f;  ///< L2 penalty of tensors whose TensorOptions::decay is set
};

/// p -= lr * (g + weight_decay * p), with heavy-ball momentum if asked for. The engine must outlive it.
template <class E>
class Sgd {
 public:
  /// Seals the engine; with momentum takes S of memory. @note Collective: sealing is.
  explicit Sgd(E& engine, SgdOptions options = {}) : engine_(&engine), options_(options) {
    FSDP_EXPECTS(options.momentum >= 0.0f && options.momentum < 1.0f && options.weight_decay >= 0.0f,
                 "Sgd: momentum {} must be in [0, 1) and weight decay {} not negative", options.momentum,
                 options.weight_decay);
    engine.attach_optimizer();
    std::int64_t elements = 0;
    for (std::size_t u = 0; u < engine.unit_count(); ++u) elements += engine.unit(u).shard_numel();
    auto const bytes = options.momentum > 0.0f ? static_cast<std::size_t>(elements) * sizeof(float) : 0;
    memory_ = {engine.device(), engine.account(), MemoryTag::optimizer, bytes};
    engine.account().lease(MemoryTag::optimizer, static_cast<std::int64_t>(bytes));
    if (bytes > 0) engine.device().zero_async(engine.compute(), memory_.data(), bytes);
    std::int64_t offset = 0;
    for (std::size_t u = 0; u < engine.unit_count(); ++u) {
      momentum_.push_back(bytes > 0 ? memory_.template as<float>() + offset : nullptr);
      offset += engine.unit(u).shard_numel();
      chunks_.emplace_back(engine, engine.unit(u), options.weight_decay);
    }
  }
  Sgd(Sgd&&) = delete;
  ~Sgd() {
    engine_->drain_compute();
    engine_->account().lease(MemoryTag::optimizer, -static_cast<std::int64_t>(memory_.bytes()));
  }

  void step() { step(options_.lr); }

  /// One step over all units; see AdamW::step for clipping, streams and errors.
  void step(float lr) {
    FSDP_EXPECTS(std::isfinite(lr) && lr >= 0.0f, "Sgd: the learning rate must be finite and not negative, got {}", lr);
    auto const* factor = engine_->take_clip_factor();
    engine_->begin_optimizer_step();
    for (std::size_t u = 0; u < engine_->unit_count(); ++u) {
      auto& unit = engine_->unit(u);
      engine_->wait_for_reduce(unit);
      auto span = engine_->trace_update(unit);
      kernels::sgd(engine_->device(), engine_->compute(), chunks_[u].data(), chunks_[u].count(),
                   SgdScalars{lr, options_.momentum}, unit.master, static_cast<float const*>(unit.gradient),
                   momentum_[u], factor);
      span.end();
      engine_->mark_updated(unit);
    }
  }

 private:
  E* engine_;
  SgdOptions options_;
  AccountedMemory<typename E::Device const> memory_;
  std::vector<float*> momentum_;
  std::vector<ShardChunks<E>> chunks_;
};

}  // namespace fsdp
