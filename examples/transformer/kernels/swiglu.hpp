// SPDX-License-Identifier: Apache-2.0
// SwiGLU (Shazeer, arXiv:2002.05202) without biases: silu(gate) * up, and its gradient.
#pragma once

#include <cmath>
#include <cstdint>

#include "transformer/kernels/common.hpp"
#include "transformer/kernels/gelu.hpp"

namespace transformer {

namespace detail {

/// x of silu, not below -87: e^-x stays a number. NaN stays.
FSDP_HD inline float silu_argument(float x) { return -87.0f > x ? -87.0f : x; }
/// e^-x of silu_argument(x); beyond 87 what it is there, which 1 does not feel.
[[gnu::always_inline]] FSDP_HD inline float silu_exp(float argument) {
  return math::exp_in_range(-math::at_most(argument, 87.0f));
}

}  // namespace detail

/// x / (1 + e^-x). Largest error over all fp32 inputs against fp64 (checked by tests): 3 units in the last place of the
/// exact result for x >= -87; below, where the exact result is smaller than 2e-36, it is that of -87. NaN gives NaN.
[[gnu::always_inline]] FSDP_HD inline float silu(float x) {
  float const argument = detail::silu_argument(x);
  return argument / (1.0f + detail::silu_exp(argument));
}
FSDP_HD inline double silu(double x) { return x / (1.0 + ::exp(-x)); }

/// silu to the bit, and its derivative, within 2.5e-7 times max(1, |x|) in fp32, by one exponential.
[[gnu::always_inline]] FSDP_HD inline WithDerivative<float> silu_with_derivative(float x) {
  float const argument = detail::silu_argument(x);
  float const exponential = detail::silu_exp(argument), logistic = 1.0f / (1.0f + exponential);
  float const rest = exponential * logistic;  // 1 - logistic
  float const bounded = detail::within(argument, 87.0f);
  return {argument / (1.0f + exponential),
          fsdp::math::unless_nan(x, fsdp::math::mul_add(logistic, bounded * rest, logistic))};
}
FSDP_HD inline WithDerivative<double> silu_with_derivative(double x) {
  double const logistic = 1.0 / (1.0 + ::exp(-x)), rest = 1.0 / (1.0 + ::exp(x));
  return {silu(x), logistic + logistic * rest * x};
}

namespace detail {

struct SwigluForward {
  template <class Block, class A>
  FSDP_HD void operator()(Block const& block, std::int64_t row, A const* gate_up, A* y, std::int64_t columns) const {
    using T = Compute<A>;
    A const* const gate = gate_up + row * 2 * columns;
    block.each(
        columns, y + row * columns, [](T g, T u) { return silu(g) * u; }, gate, gate + columns);
  }
};

struct SwigluBackward {
  template <class Block, class A>
  FSDP_HD void operator()(Block const& block, std::int64_t row, A* gate_up, A* gradient, std::int64_t columns) const {
    using T = Compute<A>;
    A* const gate = gate_up + row * 2 * columns;
    block.update(
        columns,
        [](T& g, T& u, T& d) {
          auto const [value, derivative] = silu_with_derivative(g);
          T const result = value * u;
          g = d * u * derivative;
          u = d * value;
          d = result;
        },
        gate, gate + columns, gradient + row * columns);
  }
};

}  // namespace detail

/// y (rows, columns) = silu(gate) * up.
/// @param gate_up  (rows, 2 columns): gate and up side by side
/// @pre y is not gate_up
template <fsdp::Device D, class A>
void swiglu_forward(D const& device, typename D::Stream& stream, A const* gate_up, A* y, std::int64_t rows,
                    std::int64_t columns) {
  if (rows > 0) device.launch(stream, rows, detail::SwigluForward{}, gate_up, y, columns);
}

/// gate_up (rows, 2 columns) = its gradient, gradient (rows, columns) = swiglu_forward's result, to the bit: backward
/// of the product behind it wants that, and it is not kept.
/// @param gradient  of the result
/// @pre gradient is not gate_up
template <fsdp::Device D, class A>
void swiglu_backward(D const& device, typename D::Stream& stream, A* gate_up, A* gradient, std::int64_t rows,
                     std::int64_t columns) {
  if (rows > 0) device.launch(stream, rows, detail::SwigluBackward{}, gate_up, gradient, columns);
}

}  // namespace transformer
