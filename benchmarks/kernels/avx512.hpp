// SPDX-License-Identifier: Apache-2.0
// The reference: LayerNorm, softmax and GELU written by hand with AVX-512 intrinsics.
#pragma once

#if defined(__AVX512F__) && defined(__AVX512DQ__)

// GCC 12 warns of the deliberately undefined operands inside its own intrinsics (its bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

#include <cmath>
#include <cstdint>

namespace by_hand {

/// Lanes that are left at the end of a row.
inline __mmask16 rest(std::int64_t n, std::int64_t i) { return static_cast<__mmask16>((1u << (n - i)) - 1u); }

/// Sum of f(vector) over a row, four accumulators deep; f sees zeros beyond the end and must then be masked by it.
template <class F>
inline float sum(float const* x, std::int64_t n, F f) {
  __m512 a = _mm512_setzero_ps(), b = a, c = a, d = a;
  std::int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    a = _mm512_add_ps(a, f(_mm512_loadu_ps(x + i)));
    b = _mm512_add_ps(b, f(_mm512_loadu_ps(x + i + 16)));
    c = _mm512_add_ps(c, f(_mm512_loadu_ps(x + i + 32)));
    d = _mm512_add_ps(d, f(_mm512_loadu_ps(x + i + 48)));
  }
  for (; i + 16 <= n; i += 16) a = _mm512_add_ps(a, f(_mm512_loadu_ps(x + i)));
  if (i < n) {
    auto const mask = rest(n, i);
    b = _mm512_mask_add_ps(b, mask, b, f(_mm512_maskz_loadu_ps(mask, x + i)));
  }
  return _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(a, b), _mm512_add_ps(c, d)));
}

inline void layer_norm(float const* x, float const* weight, float const* bias, float* y, float* mean, float* scale,
                       std::int64_t columns) {
  float const m = sum(x, columns, [](__m512 v) { return v; }) / static_cast<float>(columns);
  __m512 const mv = _mm512_set1_ps(m);
  float const variance = sum(x, columns,
                             [=](__m512 v) {
                               __m512 const d = _mm512_sub_ps(v, mv);
                               return _mm512_mul_ps(d, d);
                             }) /
                         static_cast<float>(columns);
  float const s = 1.0f / std::sqrt(variance + 1e-5f);
  *mean = m;
  *scale = s;
  __m512 const sv = _mm512_set1_ps(s);
  std::int64_t i = 0;
  for (; i + 16 <= columns; i += 16) {
    __m512 const normal = _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(x + i), mv), sv);
    _mm512_storeu_ps(y + i, _mm512_fmadd_ps(normal, _mm512_loadu_ps(weight + i), _mm512_loadu_ps(bias + i)));
  }
  if (i < columns) {
    auto const mask = rest(columns, i);
    __m512 const normal = _mm512_mul_ps(_mm512_sub_ps(_mm512_maskz_loadu_ps(mask, x + i), mv), sv);
    __m512 const value =
        _mm512_fmadd_ps(normal, _mm512_maskz_loadu_ps(mask, weight + i), _mm512_maskz_loadu_ps(mask, bias + i));
    _mm512_mask_storeu_ps(y + i, mask, value);
  }
}

/// e^x for x <= 0, underflowing gradually: scalef takes the power of two as it comes.
inline __m512 exp(__m512 x) {
  __m512 const bounded = _mm512_max_ps(x, _mm512_set1_ps(-104.0f));
  __m512 const whole = _mm512_roundscale_ps(_mm512_mul_ps(bounded, _mm512_set1_ps(1.44269504f)),
                                            _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 r = _mm512_fnmadd_ps(whole, _mm512_set1_ps(0.693145752f), bounded);
  r = _mm512_fnmadd_ps(whole, _mm512_set1_ps(1.42860677e-6f), r);
  __m512 p = _mm512_set1_ps(0.00138141797f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.00836891867f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.0416684076f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.166665196f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.49999994f));
  p = _mm512_add_ps(_mm512_fmadd_ps(_mm512_mul_ps(r, r), p, r), _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, whole);
}

/// Softmax of one row in place.
inline void softmax(float* x, std::int64_t n) {
  __m512 top = _mm512_set1_ps(-HUGE_VALF), top_2 = top;
  std::int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    top = _mm512_max_ps(top, _mm512_loadu_ps(x + i));
    top_2 = _mm512_max_ps(top_2, _mm512_loadu_ps(x + i + 16));
  }
  for (; i + 16 <= n; i += 16) top = _mm512_max_ps(top, _mm512_loadu_ps(x + i));
  if (i < n) {
    auto const mask = rest(n, i);
    top_2 = _mm512_mask_max_ps(top_2, mask, top_2, _mm512_maskz_loadu_ps(mask, x + i));
  }
  __m512 const largest = _mm512_set1_ps(_mm512_reduce_max_ps(_mm512_max_ps(top, top_2)));
  __m512 total = _mm512_setzero_ps(), total_2 = total;
  for (i = 0; i + 32 <= n; i += 32) {
    __m512 const a = by_hand::exp(_mm512_sub_ps(_mm512_loadu_ps(x + i), largest));
    __m512 const b = by_hand::exp(_mm512_sub_ps(_mm512_loadu_ps(x + i + 16), largest));
    _mm512_storeu_ps(x + i, a);
    _mm512_storeu_ps(x + i + 16, b);
    total = _mm512_add_ps(total, a);
    total_2 = _mm512_add_ps(total_2, b);
  }
  for (; i + 16 <= n; i += 16) {
    __m512 const a = by_hand::exp(_mm512_sub_ps(_mm512_loadu_ps(x + i), largest));
    _mm512_storeu_ps(x + i, a);
    total = _mm512_add_ps(total, a);
  }
  if (i < n) {
    auto const mask = rest(n, i);
    __m512 const a = by_hand::exp(_mm512_sub_ps(_mm512_maskz_loadu_ps(mask, x + i), largest));
    _mm512_mask_storeu_ps(x + i, mask, a);
    total_2 = _mm512_mask_add_ps(total_2, mask, total_2, a);
  }
  __m512 const inverse = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(_mm512_add_ps(total, total_2)));
  for (i = 0; i + 16 <= n; i += 16) _mm512_storeu_ps(x + i, _mm512_mul_ps(_mm512_loadu_ps(x + i), inverse));
  if (i < n) {
    auto const mask = rest(n, i);
    _mm512_mask_storeu_ps(x + i, mask, _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, x + i), inverse));
  }
}

template <class... Rest>
inline __m512 horner(__m512, float last) {
  return _mm512_set1_ps(last);
}
template <class... Rest>
inline __m512 horner(__m512 x, float first, Rest... rest) {
  return _mm512_fmadd_ps(by_hand::horner(x, rest...), x, _mm512_set1_ps(first));
}

/// By a rational for erf, which takes a division and errs up to 8 units in the last place.
inline __m512 gelu(__m512 v) {
  __m512 const x = _mm512_max_ps(v, _mm512_set1_ps(-10.0f));
  __m512 z = _mm512_mul_ps(x, _mm512_set1_ps(0.707106781f));
  z = _mm512_min_ps(_mm512_max_ps(z, _mm512_set1_ps(-4.2f)), _mm512_set1_ps(4.2f));
  __m512 const s = _mm512_mul_ps(z, z);
  __m512 const above =
      by_hand::horner(s, 1.12837911f, 0.190782666f, 0.0527901165f, 0.00377955521f, 0.000284806767f, 2.04197136e-06f);
  __m512 const below =
      by_hand::horner(s, 1.0f, 0.502409458f, 0.11425703f, 0.0149973296f, 0.00116519851f, 3.80039855e-05f);
  __m512 const one = _mm512_set1_ps(1.0f);
  __m512 erf = _mm512_div_ps(_mm512_mul_ps(z, above), below);
  erf = _mm512_min_ps(_mm512_max_ps(erf, _mm512_set1_ps(-1.0f)), one);
  return _mm512_mul_ps(_mm512_mul_ps(x, _mm512_set1_ps(0.5f)), _mm512_add_ps(erf, one));
}

inline void gelu(float const* x, float* y, std::int64_t n) {
  std::int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    __m512 const a = gelu(_mm512_loadu_ps(x + i));
    __m512 const b = gelu(_mm512_loadu_ps(x + i + 16));
    _mm512_storeu_ps(y + i, a);
    _mm512_storeu_ps(y + i + 16, b);
  }
  for (; i + 16 <= n; i += 16) _mm512_storeu_ps(y + i, gelu(_mm512_loadu_ps(x + i)));
  if (i < n) {
    auto const mask = rest(n, i);
    _mm512_mask_storeu_ps(y + i, mask, gelu(_mm512_maskz_loadu_ps(mask, x + i)));
  }
}

}  // namespace by_hand

#endif
