// SPDX-License-Identifier: Apache-2.0
// Kernels of an exponential moving average of weights.
#pragma once

#include <cstdint>

#include "fsdp/concepts.hpp"
#include "fsdp/kernels/block.hpp"
#include "fsdp/kernels/elementwise.hpp"
#include "fsdp/kernels/norms.hpp"

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
