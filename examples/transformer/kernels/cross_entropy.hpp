// SPDX-License-Identifier: Apache-2.0
// Softmax cross-entropy over rows of logits, with its gradient in the same kernel.
#pragma once

#include <cstdint>
#include <type_traits>

#include "transformer/kernels/common.hpp"

namespace transformer {

namespace detail {

/// One lane for a row. The exponentials stay in the logits where those are wide enough.
struct CrossEntropy {
  template <class Block, class A, class Index>
  FSDP_HD void operator()(Block const& block, std::int64_t row, A* logits, Index const* targets, Compute<A>* losses,
                          std::int64_t vocabulary, std::int64_t padded, Compute<A> scale, bool gradient) const {
    using T = Compute<A>;
    A* const out = logits + row * padded;
    A const* const in = out;
    auto const zero = [](std::int64_t) { return T(0); };
    auto const target = static_cast<std::int64_t>(targets[row]);
    if (target < 0) {
      losses[row] = T(0);
      if (gradient) block.each(padded, out, zero, fsdp::Indices{});
      return;
    }
    T const chosen = fsdp::widen(in[target]);
    T const largest = block.max(
        vocabulary, [](T v) { return v; }, in);
    // Used more than once: a compiler may call it instead, and a loop with a call is not vectorised.
    auto const power = [=](T v) __attribute__((always_inline)) { return fsdp::math::exp_to_zero(v - largest); };
    if (!gradient) {
      T const sum = block.sum(vocabulary, power, in);
      losses[row] = fsdp::math::log(sum) + (largest - chosen);
      return;
    }
    T sum;
    if constexpr (std::is_same_v<A, T>) {
      sum = block.each_sum(vocabulary, out, power, in);
      T const factor = scale / sum;
      block.each(
          vocabulary, out, [=](T v) { return v * factor; }, in);
    } else {
      sum = block.sum(vocabulary, power, in);
      T const factor = scale / sum;
      block.each(
          vocabulary, out, [=](T v) { return power(v) * factor; }, in);
    }
    block.each(padded - vocabulary, out + vocabulary, zero, fsdp::Indices{});
    losses[row] = fsdp::math::log(sum) + (largest - chosen);
    // From the exact value, not from the rounded one: p - 1 cancels where the model is sure.
    out[target] = fsdp::narrow<A>((power(chosen) / sum - T(1)) * scale);
  }
};

/// A block for a row, which it reads twice: for the largest logit with the sum of exponentials, and for the gradient.
struct CrossEntropyRows {
  static constexpr int threads = 1024;  // few rows at a time: the second read comes out of a cache

  template <class Block, class A, class Index>
  FSDP_HD void operator()(Block const& block, std::int64_t row, A* logits, Index const* targets, Compute<A>* losses,
                          std::int64_t vocabulary, std::int64_t padded, Compute<A> scale, bool gradient) const {
    using T = Compute<A>;
    A* const out = logits + row * padded;
    A const* const in = out;
    auto const zero = [](std::int64_t) { return T(0); };
    auto const target = static_cast<std::int64_t>(targets[row]);
    if (target < 0) {
      if (block.thread() == 0) losses[row] = T(0);
      if (gradient) block.each(padded, out, zero, fsdp::Indices{});
      return;
    }
    T const chosen = fsdp::widen(in[target]);
    auto const [largest, sum] = block.max_and_sum_exp(vocabulary, in);
    if (block.thread() == 0) losses[row] = fsdp::math::log(sum) + (largest - chosen);
    if (!gradient) return;
    T const top = largest, factor = scale / sum;
    block.each(
        vocabulary, out, [=](T v) { return fsdp::math::exp_to_zero(v - top) * factor; }, in);
    block.each(padded - vocabulary, out + vocabulary, zero, fsdp::Indices{});
    block.sync();  // the row is written, before its target changes
    // From the exact value, not from the rounded one: p - 1 cancels where the model is sure.
    if (block.thread() == 0)
      out[target] = fsdp::narrow<A>((fsdp::math::exp_to_zero(chosen - top) / sum - T(1)) * scale);
  }
};

/// The kernel for a device.
template <class D>
using CrossEntropyOn = std::conditional_t<fsdp::RunsThreadBlocks<D>, CrossEntropyRows, CrossEntropy>;

}  // namespace detail

/// losses (rows) = -log softmax(logits)[target], and the logits become scale * gradient of each loss.
/// @param logits   (rows, padded): only the first `vocabulary` columns count; gradients of the others are 0
/// @param targets  (rows), in [0, vocabulary); a negative one gives no loss and no gradient
/// @param scale    usually 1 / number of counted rows
template <fsdp::Device D, class A, class Index>
void cross_entropy_backward(D const& device, typename D::Stream& stream, A* logits, Index const* targets,
                            Compute<A>* losses, std::int64_t rows, std::int64_t vocabulary, std::int64_t padded,
                            double scale) {
  if (rows == 0) return;
  device.launch(stream, rows, detail::CrossEntropyOn<D>{}, logits, targets, losses, vocabulary, padded,
                static_cast<Compute<A>>(scale), true);
}

/// losses (rows) alone; the logits stay as they are.
template <fsdp::Device D, class A, class Index>
void cross_entropy_forward(D const& device, typename D::Stream& stream, A* logits, Index const* targets,
                           Compute<A>* losses, std::int64_t rows, std::int64_t vocabulary, std::int64_t padded) {
  if (rows == 0) return;
  device.launch(stream, rows, detail::CrossEntropyOn<D>{}, logits, targets, losses, vocabulary, padded, Compute<A>(0),
                false);
}

}  // namespace transformer
