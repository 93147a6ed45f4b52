// SPDX-License-Identifier: Apache-2.0
// GELU by both of its formulas, and their derivatives: one source for host and CUDA, without branches in fp32.
#pragma once

#include <cmath>
#include <cstdint>

#include "fsdp/kernels.hpp"
#include "fsdp/tensor.hpp"

namespace transformer {

namespace detail {

namespace math = fsdp::math;

/// x between -bound and bound; either of them where x is NaN.
FSDP_HD inline float within(float x, float bound) { return math::at_most(math::at_least(x, -bound), bound); }

/// [Note: Normal distribution function]
/// Phi(x) = 1/2 + x p(x^2): p is entire and falls from 0.4 to 0.09 over |x| <= 5.5, where Phi reaches 1 to fp32. A
/// polynomial of degree 16 in w = x^2 - 16.34375, near the middle, neither cancels nor divides. Fitted by weighted
/// least squares in double against 40 digits, weights raised where the relative error is largest until it is level
/// (Lawson), coefficients rounded to fp32 one after another and the others fitted again: 4.6e-9 of p. The centre is
/// where p is nearly a number of fp32. Beyond 5.5 the polynomial leads x p past 1/2, and results are bounded.

/// p in two parts, since 1/2 + x p keeps only what p has beyond fp32 where x is negative.
struct CenteredNormal {
  float high, low;
};
FSDP_HD inline CenteredNormal centered_normal(float w) {
  float const first = 0.123671949f;
  float const v = w * w;
  // Even and odd powers: one chain of dependent steps would be twice as long.
  float const even = math::horner(v, -0.00378001528f, -8.65686616e-06f, -2.27348949e-08f, -5.33249001e-11f,
                                  -9.98557858e-14f, -1.58528331e-16f, -1.26934355e-19f, -2.90360388e-22f);
  float const odd = math::horner(v, 0.000172599379f, 4.45534198e-07f, 1.12438292e-09f, 2.41285724e-12f, 3.71576329e-15f,
                                 7.08124259e-18f, -7.40333868e-22f, 1.40931547e-23f);
  float const rest = math::mul_add(w, odd, even);
  float const high = math::mul_add(w, rest, first);
  return {high, math::mul_add(w, rest, first - high)};
}

/// x^2 - 16.34375, bounded where Phi is 1: `scaled` is a multiple of x.
FSDP_HD inline float centered_square(float scaled, float x) {
  return math::at_most(math::mul_add(scaled, x, -16.34375f), 14.45875f);
}

/// The standard normal distribution function of a finite x.
FSDP_HD inline float normal_cdf(float x) {
  auto const p = centered_normal(centered_square(x, x));
  float const sum = math::at_most(math::mul_add(x, p.low, math::mul_add(x, p.high, 0.5f)), 1.0f);
  auto const bits = fsdp::detail::bit_cast<std::int32_t>(sum);
  return fsdp::detail::bit_cast<float>(bits < 0 ? 0 : bits);
}

}  // namespace detail

/// x times the standard normal distribution function of x: the exact GELU (Hendrycks and Gimpel, arXiv:1606.08415).
/// Largest errors over all fp32 inputs against fp64 (checked by tests): 1.6e-7 times max(1, |x|); for x >= 0 also 3
/// units in the last place of the exact result. NaN gives NaN.
FSDP_HD inline float gelu(float x) {
  float const bounded = -6.0f > x ? -6.0f : x;  // NaN stays
  return bounded * detail::normal_cdf(fsdp::math::at_most(bounded, 6.0f));
}
FSDP_HD inline double gelu(double x) { return 0.5 * x * ::erfc(-0.70710678118654752 * x); }

/// A formula's value and its derivative at one place.
template <class T>
struct WithDerivative {
  T value, derivative;
};

/// gelu to the bit, and its derivative, within 2e-7 times max(1, |x|) in fp32, by one evaluation of the distribution
/// function: beyond 6 it is what it is at 6.
[[gnu::always_inline]] FSDP_HD inline WithDerivative<float> gelu_with_derivative(float x) {
  float const not_below = -13.0f > x ? -13.0f : x;  // NaN stays
  float const bounded = detail::within(x, 13.0f);
  float const cdf = detail::normal_cdf(bounded);
  float const density = fsdp::math::exp_in_range(-0.5f * bounded * bounded) * 0.398942280f;
  return {not_below * cdf, fsdp::math::unless_nan(x, fsdp::math::mul_add(bounded, density, cdf))};
}
FSDP_HD inline WithDerivative<double> gelu_with_derivative(double x) {
  double const cdf = 0.5 * ::erfc(-0.70710678118654752 * x);
  return {x * cdf, cdf + x * 0.39894228040143268 * ::exp(-0.5 * x * x)};
}

namespace detail {

/// [Note: GELU by the logistic function]
/// gelu_new is x (1 + tanh u) / 2 with u = sqrt(2/pi) (x + 0.044715 x^3). Since (1 + tanh u) / 2 = 1 / (1 + e^-2u), it
/// takes one exponential and one quotient, and nothing cancels where x is negative. Beyond |x| = 9 the logistic
/// function is 0 or 1 to fp32 (e^-66), and e^-2u stays a normal number within it.

/// sqrt(8/pi) and 0.044715 sqrt(8/pi): 2u = x (tanh_slope + tanh_cubic x^2).
inline constexpr double tanh_slope = 1.59576912160573071, tanh_cubic = 0.0713548162726002488;

/// e^-2u of |x| <= 9.
FSDP_HD inline float tanh_gelu_exp(float x) {
  float const twice = math::mul_add(x * x, -static_cast<float>(tanh_cubic), -static_cast<float>(tanh_slope));
  return math::exp_in_range(x * twice);
}

}  // namespace detail

/// x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2: GELU as GPT-2 computes it (same paper), "gelu_new" to HuggingFace.
/// Largest errors over all fp32 inputs against fp64 (checked by tests): 1.6e-7 times max(1, |x|); for x >= 0 also 3
/// units in the last place of the exact result. NaN gives NaN.
FSDP_HD inline float gelu_new(float x) {
  float const bounded = -9.0f > x ? -9.0f : x;  // NaN stays
  return bounded / (1.0f + detail::tanh_gelu_exp(fsdp::math::at_most(bounded, 9.0f)));
}
FSDP_HD inline double gelu_new(double x) {
  return x / (1.0 + ::exp(-x * (detail::tanh_slope + detail::tanh_cubic * x * x)));
}

/// gelu_new to the bit, and its derivative, within 2.5e-7 times max(1, |x|) in fp32, by one exponential.
[[gnu::always_inline]] FSDP_HD inline WithDerivative<float> gelu_new_with_derivative(float x) {
  float const not_below = -9.0f > x ? -9.0f : x;  // NaN stays
  float const bounded = detail::within(x, 9.0f);
  float const exponential = detail::tanh_gelu_exp(bounded);
  float const logistic = 1.0f / (1.0f + exponential);
  float const slope = fsdp::math::mul_add(bounded * bounded, static_cast<float>(3.0 * detail::tanh_cubic),
                                          static_cast<float>(detail::tanh_slope));
  float const rest = exponential * logistic;  // 1 - logistic
  return {not_below / (1.0f + exponential),
          fsdp::math::unless_nan(x, fsdp::math::mul_add(logistic, bounded * slope * rest, logistic))};
}
FSDP_HD inline WithDerivative<double> gelu_new_with_derivative(double x) {
  double const twice = x * (detail::tanh_slope + detail::tanh_cubic * x * x);
  double const logistic = 1.0 / (1.0 + ::exp(-twice)), rest = 1.0 / (1.0 + ::exp(twice));
  return {gelu_new(x), logistic + logistic * rest * x * (detail::tanh_slope + 3.0 * detail::tanh_cubic * x * x)};
}

/// A formula of GELU with its derivative, in float and double; kernels are instantiated for it.
struct ExactGelu {
  template <class T>
  FSDP_HD static T value(T x) {
    return gelu(x);
  }
  template <class T>
  FSDP_HD static WithDerivative<T> with_derivative(T x) {
    return gelu_with_derivative(x);
  }
};
struct TanhGelu {
  template <class T>
  FSDP_HD static T value(T x) {
    return gelu_new(x);
  }
  template <class T>
  FSDP_HD static WithDerivative<T> with_derivative(T x) {
    return gelu_new_with_derivative(x);
  }
};

}  // namespace transformer
