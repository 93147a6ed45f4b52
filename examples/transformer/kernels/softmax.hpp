// SPDX-License-Identifier: Apache-2.0
// Causal softmax of score panels, forward and backward.
#pragma once

#include <cstdint>
#include <type_traits>

#include "transformer/kernels/common.hpp"

namespace transformer {

namespace detail {

/// Keys that a row of a panel sees: the panel's last row sees all.
FSDP_HD constexpr std::int64_t visible(std::int64_t row, std::int64_t rows, std::int64_t keys) {
  return keys - rows + row % rows + 1;
}

struct CausalSoftmax {
  template <class Block, class A>
  FSDP_HD void operator()(Block const& block, std::int64_t row, A* scores, std::int64_t rows, std::int64_t keys,
                          Compute<A> scale) const {
    using T = Compute<A>;
    A* const out = scores + row * keys;
    A const* const in = out;
    std::int64_t const length = visible(row, rows, keys);
    T const offset = scale * block.max(
                                 length, [](T v) { return v; }, in);
    // Used more than once: a compiler may call it instead, and a loop with a call is not vectorised.
    auto const power = [=](T v) __attribute__((always_inline)) { return fsdp::math::exp_to_zero(scale * v - offset); };
    if constexpr (std::is_same_v<A, T>) {
      T const inverse = T(1) / block.each_sum(length, out, power, in);
      block.each(
          length, out, [=](T v) { return v * inverse; }, in);
    } else {  // computing a power again is more exact than storing it rounded
      T const inverse = T(1) / block.sum(length, power, in);
      block.each(
          length, out, [=](T v) { return power(v) * inverse; }, in);
    }
    block.each(
        keys - length, out + length, [](std::int64_t) { return T(0); }, fsdp::Indices{});
  }
};

struct CausalSoftmaxBackward {
  template <class Block, class A>
  FSDP_HD void operator()(Block const& block, std::int64_t row, A const* probabilities, A* gradient, std::int64_t rows,
                          std::int64_t keys, Compute<A> scale) const {
    using T = Compute<A>;
    A const* const p = probabilities + row * keys;
    A* const g = gradient + row * keys;
    std::int64_t const length = visible(row, rows, keys);
    T const mean = block.sum(
        length, [](T a, T b) { return a * b; }, p, static_cast<A const*>(g));
    block.update(
        length, [=](T& slope, T probability) { slope = probability * (slope - mean) * scale; }, g, p);
    block.each(
        keys - length, g + length, [](std::int64_t) { return T(0); }, fsdp::Indices{});
  }
};

}  // namespace detail

/// scores (panels, rows, keys) = softmax(scale * scores) over the keys that each row sees, 0 for the others, in place.
/// Row r of a panel sees keys - rows + r + 1 keys.
/// @pre rows <= keys, scale > 0
template <fsdp::Device D, class A>
void causal_softmax(D const& device, typename D::Stream& stream, A* scores, std::int64_t panels, std::int64_t rows,
                    std::int64_t keys, double scale = 1.0) {
  if (panels * rows == 0) return;
  device.launch(stream, panels * rows, detail::CausalSoftmax{}, scores, rows, keys, static_cast<Compute<A>>(scale));
}

/// gradient (panels, rows, keys) = scale * p (gradient - sum over keys of p gradient), in place; 0 for unseen keys.
/// @param probabilities  (panels, rows, keys): what causal_softmax gave
template <fsdp::Device D, class A>
void causal_softmax_backward(D const& device, typename D::Stream& stream, A const* probabilities, A* gradient,
                             std::int64_t panels, std::int64_t rows, std::int64_t keys, double scale = 1.0) {
  if (panels * rows == 0) return;
  device.launch(stream, panels * rows, detail::CausalSoftmaxBackward{}, probabilities, gradient, rows, keys,
                static_cast<Compute<A>>(scale));
}

}  // namespace transformer
