// SPDX-License-Identifier: Apache-2.0
// AdamW on flat shards.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "fsdp/engine.hpp"
#include "fsdp/optim/shard_chunks.hpp"

namespace fsdp {

struct AdamWOptions {
  float lr = 1e-3f;  ///< learning rate of step() without an argument
  float beta1 = 0.9f;
  float beta2 = 0.999f;
  float eps = 1e-8f;
  float weight_decay = 0.01f;  ///< of tensors whose TensorOptions::decay is set
};

/// Adam with decoupled weight decay (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019,
/// algorithm 2). Keeps two fp32 moments per element of the shards. The engine must outlive it.
template <class E>
class AdamW {
 public:
  /// Seals the engine, and takes 2 S of memory for the moments.
  /// @throws UsageError on options out of range
  /// @note Collective: sealing is.
  explicit AdamW(E& engine, AdamWOptions options = {}) : engine_(&engine), options_(options) {
    FSDP_EXPECTS(options.beta1 >= 0.0f && options.beta1 < 1.0f && options.beta2 >= 0.0f && options.beta2 < 1.0f,
                 "AdamW: betas must be in [0, 1), got {} and {}", options.beta1, options.beta2);
    FSDP_EXPECTS(options.eps >= 0.0f && options.weight_decay >= 0.0f,
                 "AdamW: eps {} and weight decay {} must not be negative", options.eps, options.weight_decay);
    engine.attach_optimizer();
    std::int64_t elements = 0;
    for (std::size_t u = 0; u < engine.unit_count(); ++u) elements += engine.unit(u).shard_numel();
    auto const bytes = static_cast<std::size_t>(elements) * sizeof(float);
    memory_ = {engine.device(), engine.account(), MemoryTag::optimizer, 2 * bytes};
    engine.account().lease(MemoryTag::optimizer, static_cast<std::int64_t>(2 * bytes));
    engine.device().zero_async(engine.compute(), memory_.data(), memory_.bytes());
    auto* at = memory_.template as<float>();
    for (std::size_t u = 0; u < engine.unit_count(); ++u) {
      first_.push_back(at);
      second_.push_back(at + elements);
      at += engine.unit(u).shard_numel();
      chunks_.emplace_back(engine, engine.unit(u), options.weight_decay);
    }
  }
  AdamW(AdamW&&) = delete;
  ~AdamW() {
    engine_->drain_compute();
    engine_->account().lease(MemoryTag::optimizer, -static_cast<std::int64_t>(memory_.bytes()));
  }

  void step() { step(options_.lr); }

  /// One step over all units with learning rate `lr`, multiplying gradients by the factor of the last clip_grad_norm,
  /// if any.
  /// @throws UsageError if a unit has no reduced gradients
  /// @note Stream: on compute; each unit's update waits for its own reduction only, and the next gather of a unit for
  /// its own
  ///       update only.
  /// @note Collective: no.
  void step(float lr) {
    FSDP_EXPECTS(std::isfinite(lr) && lr >= 0.0f, "AdamW: the learning rate must be finite and not negative, got {}",
                 lr);
    ++steps_;
    auto const correction = [this](float beta) {
      return static_cast<float>(1.0 - std::pow(static_cast<double>(beta), static_cast<double>(steps_)));
    };
    AdamWScalars const scalars{
        lr, options_.beta1, options_.beta2, options_.eps, correction(options_.beta1), correction(options_.beta2)};
    auto const* factor = engine_->take_clip_factor();
    engine_->begin_optimizer_step();
    for (std::size_t u = 0; u < engine_->unit_count(); ++u) {
      auto& unit = engine_->unit(u);
      engine_->wait_for_reduce(unit);
      auto span = engine_->trace_update(unit);
      kernels::adamw(engine_->device(), engine_->compute(), chunks_[u].data(), chunks_[u].count(), scalars, unit.master,
                     static_cast<float const*>(unit.gradient), first_[u], second_[u], factor);
      span.end();
      engine_->mark_updated(unit);
    }
  }

  std::int64_t steps() const { return steps_; }
  AdamWOptions const& options() const { return options_; }

 private:
  E* engine_;
  AdamWOptions options_;
  std::int64_t steps_ = 0;
  AccountedMemory<typename E::Device const> memory_;
  std::vector<float*> first_, second_;
  std::vector<ShardChunks<E>> chunks_;
};

}  // namespace fsdp
