// SPDX-License-Identifier: Apache-2.0
// Kernels of optimizers: a step's scalars, AdamW and SGD over flat shards, and an exponential moving average of
// weights.
#pragma once

#include <cstdint>

#include "fsdp/concepts.hpp"
#include "fsdp/detail/kernels/block.hpp"
#include "fsdp/detail/kernels/elementwise.hpp"
#include "fsdp/detail/kernels/norms.hpp"
#include "fsdp/detail/kernels/random.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// A run of consecutive elements of one tensor that one block of an optimizer kernel updates.
struct OptimizerChunk {
  std::int64_t begin = 0;  ///< first element inside the shard
  std::int32_t count = 0;
  float weight_decay = 0.0f;
  std::uint64_t tensor = 0;  ///< hash_name() of the tensor's name
  std::int64_t first = 0;    ///< first element inside the full tensor
  std::int64_t shift = 0;    ///< begin + shift is the first element inside the moments
};

/// Scalars of one step, in device memory; all kernels of the step read them. Zero it before the first step.
struct OptimizerStep {
  std::int64_t taken = 0;      ///< steps taken, this one included; skipped ones do not count
  float factor = 1.0f;         ///< gradients are multiplied by it; negative: this step changes nothing
  float learning_rate = 0.0f;  ///< of this step
  float correction1 = 1.0f;    ///< 1 - beta1^taken
  float correction2 = 1.0f;    ///< 1 - beta2^taken
};

/// Constants of AdamW.
struct AdamWScalars {
  float beta1 = 0.9f;
  float beta2 = 0.999f;
  float epsilon = 1e-8f;
};

/// Constants of SGD.
struct SgdScalars {
  float momentum = 0.0f;
  bool nesterov = false;  ///< parameters move by gradient + momentum * velocity, not by the velocity
};

namespace kernels {

namespace detail {

/// 1 - beta^n by squaring: relative error about n roundings of beta^n.
FSDP_HD inline float bias_correction(float beta, std::int64_t n) {
  double power = 1.0;
  for (double square = static_cast<double>(beta); n > 0; n >>= 1, square *= square)
    if ((n & 1) != 0) power *= square;
  return static_cast<float>(1.0 - power);
}

struct BeginStep {
  template <class Block>
  FSDP_HD void operator()(Block const& block, std::int64_t, OptimizerStep* step, float learning_rate, float beta1,
                          float beta2, ClipScalars const* clip) const {
    if (block.thread() != 0) return;
    step->factor = clip == nullptr ? 1.0f : clip->factor;
    step->learning_rate = learning_rate;
    if (step->factor < 0.0f) return;
    step->taken += 1;
    step->correction1 = bias_correction(beta1, step->taken);
    step->correction2 = bias_correction(beta2, step->taken);
  }
};

/// @tparam Stochastic  how parameters and moments narrower than fp32 are rounded
template <bool Stochastic>
struct AdamW {
  template <class Block, class P, class M>
  FSDP_HD void operator()(Block const& block, std::int64_t index, OptimizerChunk const* chunks,
                          OptimizerStep const* step, AdamWScalars s, P* p, float const* g, M* m, M* v,
                          std::uint64_t seed) const {
    OptimizerStep const now = *step;
    if (now.factor < 0.0f) return;
    OptimizerChunk const chunk = chunks[index];
    float const keep = 1.0f - now.learning_rate * chunk.weight_decay;
    float const rate = now.learning_rate / now.correction1;
    float const root_scale = 1.0f / math::sqrt(now.correction2);
    float const clip = now.factor;
    float const fresh1 = 1.0f - s.beta1, fresh2 = 1.0f - s.beta2;
    m += chunk.begin + chunk.shift;
    v += chunk.begin + chunk.shift;
    auto const update = [=](float& param, float gradient, float& first, float& second) {
      float const slope = gradient * clip;
      // Not slope + beta (moment - slope): where the slope is far larger than the moment, its rounding remains.
      first = math::mul_add(s.beta1, first, fresh1 * slope);
      second = math::mul_add(s.beta2, second, fresh2 * slope * slope);
      param = math::mul_add(param, keep, -rate * first / math::mul_add(math::sqrt(second), root_scale, s.epsilon));
    };
    if constexpr (Stochastic) {
      auto const key = rounding::key(seed, chunk.tensor, now.taken);
      block.update(
          chunk.count,
          [=](float& param, float gradient, float& first, float& second, std::int64_t element) {
            update(param, gradient, first, second);
            auto const bits = rounding::bits(key, element);
            param = rounding::stochastic<P>(param, static_cast<std::uint32_t>(bits & 0xffffu));
            first = rounding::stochastic<M>(first, static_cast<std::uint32_t>(bits >> 16 & 0xffffu));
            second = rounding::stochastic<M>(second, static_cast<std::uint32_t>(bits >> 32 & 0xffffu));
          },
          p + chunk.begin, g + chunk.begin, m, v, Indices{chunk.first});
    } else {
      block.update(chunk.count, update, p + chunk.begin, g + chunk.begin, m, v);
    }
  }
};

template <bool Stochastic>
struct Sgd {
  template <class Block, class P>
  FSDP_HD void operator()(Block const& block, std::int64_t index, OptimizerChunk const* chunks,
                          OptimizerStep const* step, SgdScalars s, P* p, float const* g, float* momentum,
                          std::uint64_t seed) const {
    OptimizerStep const now = *step;
    if (now.factor < 0.0f) return;
    OptimizerChunk const chunk = chunks[index];
    float const decay = chunk.weight_decay, rate = now.learning_rate, clip = now.factor;
    auto const key = rounding::key(seed, chunk.tensor, now.taken);
    auto const move = [=](float& param, float slope, std::int64_t element) {
      param = math::mul_add(-rate, slope, param);
      if constexpr (Stochastic)
        param = rounding::stochastic<P>(param, static_cast<std::uint32_t>(rounding::bits(key, element) & 0xffffu));
    };
    if (momentum == nullptr) {
      block.update(
          chunk.count,
          [=](float& param, float gradient, std::int64_t element) {
            move(param, math::mul_add(decay, param, gradient * clip), element);
          },
          p + chunk.begin, g + chunk.begin, Indices{chunk.first});
    } else {
      block.update(
          chunk.count,
          [=](float& param, float gradient, float& velocity, std::int64_t element) {
            float const slope = math::mul_add(decay, param, gradient * clip);
            velocity = math::mul_add(s.momentum, velocity, slope);
            move(param, s.nesterov ? math::mul_add(s.momentum, velocity, slope) : velocity, element);
          },
          p + chunk.begin, g + chunk.begin, momentum + chunk.begin + chunk.shift, Indices{chunk.first});
    }
  }
};

}  // namespace detail

/// Writes the scalars of the next step. A step that clipping says to skip leaves `taken` and the corrections alone.
/// @param clip  what clip_factor decided; null: no clipping
template <Device D>
void begin_step(D const& device, typename D::Stream& stream, OptimizerStep* step, float learning_rate, float beta1,
                float beta2, ClipScalars const* clip) {
  device.launch(stream, 1, detail::BeginStep{}, step, learning_rate, beta1, beta2, clip);
}

/// Takes an AdamW step over a flat shard, with decoupled weight decay per chunk (Loshchilov and Hutter,
/// arXiv:1711.05101). Arithmetic is fp32; parameters and moments are rounded as they are stored.
/// @tparam Stochastic  stochastic rounding instead of to nearest even: see [Note: Stochastic rounding]
/// @param chunks  chunk_count disjoint chunks, in memory of the device
/// @param p, g  parameters and gradients: chunks begin at `begin`
/// @param m, v  first and second moments: chunks begin at begin + shift
template <bool Stochastic = false, Device D, class P, class M>
void adamw(D const& device, typename D::Stream& stream, OptimizerChunk const* chunks, std::int64_t chunk_count,
           OptimizerStep const* step, AdamWScalars scalars, P* p, float const* g, M* m, M* v, std::uint64_t seed = 0) {
  if (chunk_count > 0)
    device.launch(stream, chunk_count, detail::AdamW<Stochastic>{}, chunks, step, scalars, p, g, m, v, seed);
}

/// Takes an SGD step over a flat shard: weight decay is added to the gradient, then momentum, as in PyTorch's SGD.
/// @param momentum  velocities, zero before the first step; null for plain SGD
template <bool Stochastic = false, Device D, class P>
void sgd(D const& device, typename D::Stream& stream, OptimizerChunk const* chunks, std::int64_t chunk_count,
         OptimizerStep const* step, SgdScalars scalars, P* p, float const* g, float* momentum, std::uint64_t seed = 0) {
  if (chunk_count > 0)
    device.launch(stream, chunk_count, detail::Sgd<Stochastic>{}, chunks, step, scalars, p, g, momentum, seed);
}

}  // namespace kernels
}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE

namespace fsdp::inline FSDP_VERSION_NAMESPACE::kernels {

namespace detail {

struct UpdateAverage {
  template <class Block, class P>
  FSDP_HD void operator()(Block const& block, std::int64_t index, float* average, P const* p, std::int64_t n,
                          float decay, ClipScalars const* step) const {
    if (step != nullptr && step->factor < 0.0f) return;
    std::int64_t const begin = index * chunk_elements;
    float const fresh = 1.0f - decay;
    block.update(
        chunk_length(n, index), [=](float& sum, float param) { sum = math::mul_add(decay, sum, fresh * param); },
        average + begin, p + begin);
  }
};

struct Swap {
  template <class Block>
  FSDP_HD void operator()(Block const& block, std::int64_t index, float* a, float* b, std::int64_t n) const {
    std::int64_t const begin = index * chunk_elements;
    block.update(
        chunk_length(n, index),
        [](float& x, float& y) {
          float const kept = x;
          x = y;
          y = kept;
        },
        a + begin, b + begin);
  }
};

}  // namespace detail

/// average[i] = decay * average[i] + (1 - decay) * p[i]
/// @param step  what clip_factor decided about the last step: if that was skipped, nothing changes; null: it was taken
template <Device D, class P>
void update_average(D const& device, typename D::Stream& stream, float* average, P const* p, std::int64_t n,
                    float decay, ClipScalars const* step) {
  if (n > 0) device.launch(stream, detail::blocks_for(n), detail::UpdateAverage{}, average, p, n, decay, step);
}

/// Exchanges n elements.
template <Device D>
void swap(D const& device, typename D::Stream& stream, float* a, float* b, std::int64_t n) {
  if (n > 0) device.launch(stream, detail::blocks_for(n), detail::Swap{}, a, b, n);
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::kernels
