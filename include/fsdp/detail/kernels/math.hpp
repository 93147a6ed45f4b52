// SPDX-License-Identifier: Apache-2.0
// Elementary functions for kernels: branch-free polynomials that vectorise, one source for host and CUDA.
#pragma once

#if defined(__CUDACC__)
#include <cmath>
#endif
#include <cstdint>

#include "fsdp/detail/base/arithmetic.hpp"
#include "fsdp/tensor.hpp"

/// A function of the C library. Host compilers know these without <cmath>, which costs a file 8 % of the time that it
/// needs for this library's headers.
#if defined(__CUDACC__)
#define FSDP_C_LIBRARY(function) ::function
#else
#define FSDP_C_LIBRARY(function) __builtin_##function
#endif

/// Elementary functions of fp32, and the C library's of fp64 under the same names.
///
/// The fp32 forms have no branches and no tables, so that a loop over them vectorises. NaN gives NaN. Largest errors
/// over all fp32 inputs against fp64, in units in the last place of the exact result (checked by tests):
/// exp 1.5, log 1.5, tanh 3, sine and cosine of turns 2 (of 1.0 near their zeros).
/// Coefficients are minimax fits of this project (iteratively reweighted least squares).
namespace fsdp::inline FSDP_VERSION_NAMESPACE::math {

/// a * b + c, fused where the target fuses in hardware.
FSDP_HD inline float mul_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__CUDA_ARCH__) || defined(__ARM_FEATURE_FMA)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

/// Value of the polynomial c[0] + c[1] x + ... by Horner's rule; the coefficients are compile-time constants.
FSDP_HD inline float horner(float, float last) { return last; }
template <class... Rest>
FSDP_HD inline float horner(float x, float first, Rest... rest) {
  return mul_add(horner(x, rest...), x, first);
}

FSDP_HD inline float sqrt(float x) { return FSDP_C_LIBRARY(sqrtf)(x); }
FSDP_HD inline double sqrt(double x) { return FSDP_C_LIBRARY(sqrt)(x); }

/// The smaller of x and a positive bound, the larger of x and a negative bound: as integers, which compilers turn into
/// one instruction each (a floating-point selection becomes branches or several masks). NaN is not kept.
FSDP_HD inline float at_most(float x, float positive) {
  auto const bits = detail::bit_cast<std::int32_t>(x), bound = detail::bit_cast<std::int32_t>(positive);
  return detail::bit_cast<float>(bits < bound ? bits : bound);
}
FSDP_HD inline float at_least(float x, float negative) {
  auto const bits = detail::bit_cast<std::uint32_t>(x), bound = detail::bit_cast<std::uint32_t>(negative);
  return detail::bit_cast<float>(bits < bound ? bits : bound);
}

/// NaN when x is NaN, else the result.
FSDP_HD inline float unless_nan(float x, float result) {
#if defined(FSDP_ALLOW_FAST_MATH)  // compilers that may take every value for a number would leave the comparison out
  return (detail::bit_cast<std::uint32_t>(x) & 0x7fffffffu) > 0x7f800000u ? x : result;
#else
  return x != x ? x : result;
#endif
}

template <class T>
FSDP_HD inline T abs(T x) {
  return x < T(0) ? -x : x;
}
FSDP_HD inline float abs(float x) { return detail::bit_cast<float>(detail::bit_cast<std::uint32_t>(x) & 0x7fffffffu); }
FSDP_HD inline double abs(double x) {
  return detail::bit_cast<double>(detail::bit_cast<std::uint64_t>(x) & 0x7fffffffffffffffull);
}

/// Magnitude of the first argument, sign of the second.
FSDP_HD inline float copy_sign(float magnitude, float sign) {
  return detail::bit_cast<float>((detail::bit_cast<std::uint32_t>(magnitude) & 0x7fffffffu) |
                                 (detail::bit_cast<std::uint32_t>(sign) & 0x80000000u));
}

/// True for finite values, without a library call.
FSDP_HD inline bool is_finite(float x) { return (detail::bit_cast<std::uint32_t>(x) & 0x7f800000u) != 0x7f800000u; }
FSDP_HD inline bool is_finite(double x) {
  return (detail::bit_cast<std::uint64_t>(x) & 0x7ff0000000000000ull) != 0x7ff0000000000000ull;
}

/// x < infinity, of a positive x or NaN.
FSDP_HD inline bool below_infinity(float x) {
#if defined(FSDP_ALLOW_FAST_MATH)
  return is_finite(x);
#else
  return x < detail::bit_cast<float>(0x7f800000u);
#endif
}

/// x * scale rounded to an integer, |x * scale| <= 2^22: as a float, and in the low 22 bits of `bits`, whose upper ones
/// are those of 0x4b400000.
struct RoundedProduct {
  float whole;
  std::uint32_t bits;
};
FSDP_HD inline RoundedProduct rounded_product(float x, float scale) {
#if defined(FSDP_ALLOW_FAST_MATH)  // what follows would cancel
  auto const integer = static_cast<std::int32_t>(mul_add(x, scale, copy_sign(0.5f, x)));
  return {static_cast<float>(integer), static_cast<std::uint32_t>(integer) + 0x4b400000u};
#else
  // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low mantissa bits.
  float const shifted = mul_add(x, scale, 12582912.0f);
  return {shifted - 12582912.0f, detail::bit_cast<std::uint32_t>(shifted)};
#endif
}

/// e^x. Underflows gradually to 0, overflows to infinity.
FSDP_HD inline float exp(float x) {
  float const bounded = at_most(at_least(x, -104.0f), 89.0f);
  auto const [whole, bits] = rounded_product(bounded, 1.44269504f);
  float const reduced = mul_add(whole, -1.42860677e-6f, mul_add(whole, -0.693145752f, bounded));
  float const tail = horner(reduced, 0.49999994f, 0.166665196f, 0.0416684076f, 0.00836891867f, 0.00138141797f);
  float const mantissa = mul_add(reduced * reduced, tail, reduced) + 1.0f;
  // 2^whole in two factors, so that subnormal results round once.
  auto const exponent = static_cast<std::int32_t>(bits - 0x4b400000u);
  std::int32_t const half = exponent >> 1;
  auto const power = [](std::int32_t n) {
    return detail::bit_cast<float>((static_cast<std::uint32_t>(n) + 127u) << 23);
  };
  return unless_nan(x, mantissa * power(half) * power(exponent - half));
}
FSDP_HD inline double exp(double x) { return FSDP_C_LIBRARY(exp)(x); }

/// e^x for -87.3 <= x <= 88, in fewer steps. Inlined always, as what calls it: a loop with a call in it has no vectors.
[[gnu::always_inline]] FSDP_HD inline float exp_in_range(float x) {
  auto const [whole, bits] = rounded_product(x, 1.44269504f);
  float const reduced = mul_add(whole, -1.42860677e-6f, mul_add(whole, -0.693145752f, x));
  float const tail = horner(reduced, 0.49999994f, 0.166665196f, 0.0416684076f, 0.00836891867f, 0.00138141797f);
  float const mantissa = mul_add(reduced * reduced, tail, reduced) + 1.0f;
  return mantissa * detail::bit_cast<float>((bits << 23) + 0x3f800000u);
}

/// e^x for x <= 88: 0 where e^x is below 1.2e-38. For softmax, whose arguments are at most 0.
[[gnu::always_inline]] FSDP_HD inline float exp_to_zero(float x) { return x < -87.3f ? 0.0f : exp_in_range(x); }
FSDP_HD inline double exp_to_zero(double x) { return FSDP_C_LIBRARY(exp)(x); }

/// Natural logarithm. 0 gives -infinity, negative values NaN.
FSDP_HD inline float log(float x) {
  bool const subnormal = x < 1.17549435e-38f;
  float const normal = subnormal ? x * 8388608.0f : x;
  auto const word = detail::bit_cast<std::uint32_t>(normal);
  // Offset by sqrt(1/2), so that the mantissa lies in [sqrt(1/2), sqrt(2)).
  std::uint32_t const offset = word - 0x3f3504f3u;
  float const mantissa = detail::bit_cast<float>((offset & 0x007fffffu) + 0x3f3504f3u);
  float const exponent = static_cast<float>(static_cast<std::int32_t>(offset) >> 23) - (subnormal ? 23.0f : 0.0f);
  float const f = mantissa - 1.0f;
  float const square = f * f;
  float const tail = horner(f, 0.333333313f, -0.250008196f, 0.200012267f, -0.166233569f, 0.142017573f, -0.131601825f,
                            0.12761578f, -0.0763449743f);
  float const low = mul_add(exponent, -2.12194440e-4f, mul_add(square * f, tail, -0.5f * square));
  float const finite = mul_add(exponent, 0.693359375f, f + low);
  float const infinity = detail::bit_cast<float>(0x7f800000u);
  float const positive = below_infinity(x) ? finite : x;  // infinity and NaN stay
  float const with_zero = x == 0.0f ? -infinity : positive;
  return x < 0.0f ? detail::bit_cast<float>(0x7fc00000u) : with_zero;
}
FSDP_HD inline double log(double x) { return FSDP_C_LIBRARY(log)(x); }

/// Hyperbolic tangent.
FSDP_HD inline float tanh(float x) {
  float const size = abs(x);
  float const square = at_most(x * x, 1.0f);
  float const tail = horner(square, -0.333332777f, 0.133313313f, -0.0537300073f, 0.0206061769f, -0.00566697726f);
  float const bounded = at_most(at_least(x, -1.0f), 1.0f);
  float const small = mul_add(bounded * square, tail, bounded);
  float const large = 1.0f - 2.0f / (exp(2.0f * size) + 1.0f);
  return unless_nan(x, size < 0.625f ? small : copy_sign(large, x));
}
FSDP_HD inline double tanh(double x) { return FSDP_C_LIBRARY(tanh)(x); }

/// Sine and cosine of one angle.
struct SinCos {
  float sin, cos;
};

/// sin(2 pi u) and cos(2 pi u) of u turns, |u| <= 2^20.
FSDP_HD inline SinCos sin_cos_turns(float u) {
  auto const [whole, quarter] = rounded_product(u, 4.0f);
  float const f = mul_add(whole, -0.25f, u);  // within an eighth of a turn, exact
  float const square = f * f;
  float const sine = f * horner(square, 6.28318548f, -41.3416595f, 81.5923157f, -75.3914948f);
  float const cosine = horner(square, 1.0f, -19.7392082f, 64.9393234f, -85.4431915f, 59.2276001f);
  bool const odd = (quarter & 1u) != 0;
  float const first = odd ? cosine : sine;
  float const second = odd ? sine : cosine;
  auto const flip = [](float value, std::uint32_t sign) {
    return detail::bit_cast<float>(detail::bit_cast<std::uint32_t>(value) ^ (sign << 30 & 0x80000000u));
  };
  return {flip(first, quarter), flip(second, quarter + 1u)};
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::math

#undef FSDP_C_LIBRARY
