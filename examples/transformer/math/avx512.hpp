// SPDX-License-Identifier: Apache-2.0
// Parts that the host's AVX-512 kernels share.
//
// The files that include this one are alone in being compiled for AVX-512, whatever the rest is compiled for. So they
// instantiate nothing that another file might share, and neither does this one, whose functions are each file's own: a
// linker keeps one copy of what is shared, which an older processor may have to run.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace transformer {
namespace {

/// Elements of fp32 in a vector.
constexpr std::int64_t vector = 16;
/// Rows and columns of the result tile that stays in registers: see [Note: fp32 products].
constexpr std::int64_t tile_rows = 14, tile_columns = 32;

using Vector = __m512;
using Words = __m512i;
using Word = std::int32_t;  ///< one element of fp32, or two of bf16

constexpr std::int64_t least(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
constexpr std::int64_t whole(std::int64_t length, std::int64_t unit) { return (length + unit - 1) / unit * unit; }

inline Words load(void const* from) { return _mm512_loadu_si512(from); }
inline void store(void* to, Words value) { _mm512_storeu_si512(to, value); }

/// Columns of `to`, 32 apart, become 16 rows of 16 words that are `pitch` bytes apart; rows from `count` on are zeros.
inline void transpose(char const* from, std::int64_t pitch, std::int64_t count, Word* to) {
  Words r[16], t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = i < count ? load(from + i * pitch) : _mm512_setzero_si512();
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // quarter q of r[4 j + i] holds column 4 q + i of rows 4 j to 4 j + 3
    Words const even = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88), odd = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
    Words const even_below = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    Words const odd_below = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
    store(to + i * tile_columns, _mm512_shuffle_i32x4(even, even_below, 0x88));
    store(to + (4 + i) * tile_columns, _mm512_shuffle_i32x4(odd, odd_below, 0x88));
    store(to + (8 + i) * tile_columns, _mm512_shuffle_i32x4(even, even_below, 0xdd));
    store(to + (12 + i) * tile_columns, _mm512_shuffle_i32x4(odd, odd_below, 0xdd));
  }
}

}  // namespace
}  // namespace transformer
