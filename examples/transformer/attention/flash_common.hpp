// SPDX-License-Identifier: Apache-2.0
// Parts that the kernels of flash attention share: shape, addresses, dropout mask.
#pragma once

#include <cstdint>

#include "fsdp/kernels.hpp"
#include "transformer/kernels/dropout.hpp"
#include "transformer/kernels/tile.hpp"

namespace transformer {

/// Causal attention of `batch` sequences over packed rows q, k, v of `width` elements each; head h has the columns from
/// h * head size on. A pass computes `length` rows of each sequence, from `position` on; the keys of earlier ones are
/// there already.
struct FlashShape {
  std::int64_t batch = 1, heads = 1, length = 1;
  std::int64_t position = 0;
  std::int64_t capacity = 1;  ///< rows of packed q, k, v between two sequences
  std::int64_t width = 64;    ///< heads * head size
  std::int64_t sequence = 0;  ///< number of the first sequence, as dropout counts them
  float scale = 1.0f;         ///< of the scores, usually 1 / sqrt(head size)

  /// Rows between two heads in the statistics: whole tiles of 64.
  FSDP_HD std::int64_t statistics_rows() const { return (length + 63) / 64 * 64; }
  /// Floats that the statistics of a backward pass need: for each (sequence, head, row) a value of each kind.
  FSDP_HD std::int64_t statistics() const { return batch * heads * statistics_rows(); }
  /// Number of the first element of a row of scores, as dropout counts them: a multiple of 64.
  FSDP_HD std::int64_t mask_row(std::int64_t in_batch, std::int64_t head, std::int64_t query) const {
    return (((sequence + in_batch) * heads + head) * capacity + query) * attention_mask_pitch(capacity);
  }
  /// Counters of random words between two rows, and the first of a row at a group of 64 keys.
  FSDP_HD std::int64_t mask_counters() const { return attention_mask_pitch(capacity) / 4; }
  FSDP_HD std::int64_t mask_counter(std::int64_t in_batch, std::int64_t head, std::int64_t query, int group) const {
    return mask_row(in_batch, head, query) / 4 + 16 * std::int64_t{group};
  }
};

/// [Note: Flash attention]
/// Dao et al., arXiv:2205.14135 and 2307.08691: scores exist as tiles in registers alone. Forward walks over tiles of
/// 64 keys with the maximum and the sum of each row so far, and keeps for each row one statistic,
/// log2(sum of exp(score)), with which backward has any probability again from its score.
///
/// Backward is two kernels, each deterministic because nobody adds to what another block writes: one walks over keys
/// for a tile of queries and gives dQ, the other over queries for a tile of keys and gives dK and dV. The scores'
/// products are done twice for it: seven products of T x T / 2 instead of the five of a version with atomic additions.
///
/// Every block: 64 rows of the side that is walked over are in shared memory while the next 64 are on their way. One
/// barrier a tile does both: the next tile is there, and everyone has left the buffer of the last.
namespace flash {

inline constexpr int tile_rows = 64;
inline constexpr float log2_e = 1.44269504f;
inline constexpr float minus_infinity = -__builtin_huge_valf();

/// The head's parts of packed rows.
template <class E>
struct Packed {
  E *query, *key, *value;
  std::int64_t stride;
};
template <class E>
FSDP_HD inline Packed<E> packed(FlashShape const& s, E* qkv, std::int64_t in_batch, std::int64_t head, int head_size) {
  E* const first = qkv + in_batch * s.capacity * 3 * s.width + head * head_size;
  return {first, first + s.width, first + 2 * s.width, 3 * s.width};
}

/// Rows of one head among those of all: `stride` is the width.
template <class E>
FSDP_HD inline E* rows_of(FlashShape const& s, E* rows, std::int64_t in_batch, std::int64_t head, int head_size) {
  return rows + in_batch * s.length * s.width + head * head_size;
}

/// Maximum, or sum, over the four lanes that hold a row of a d tile.
template <class Block>
FSDP_HD inline float row_max(Block const& block, float value) {
  for (int mask = 1; mask <= 2; mask *= 2) {
    float const other = block.shuffle_xor(value, mask);
    value = value < other ? other : value;
  }
  return value;
}
template <class Block>
FSDP_HD inline float row_sum(Block const& block, float value) {
  value += block.shuffle_xor(value, 1);
  return value + block.shuffle_xor(value, 2);
}

/// The factors of dropout for scores. A group of 64 keys is one group of random elements, so that one counter serves
/// keys k, k + 16, k + 32 and k + 48. A row's counters begin at a quarter of FlashShape::mask_row: a multiple of 16.
struct ScoreMask {
  fsdp::RandomSequence sequence;
  detail::DropoutFactors factors;

  FSDP_HD explicit ScoreMask(DropoutMask const& mask)
      : sequence(mask.sequence()), factors(detail::dropout_factors(mask)) {}
  /// The random words of a counter, `step` behind `counter`. @pre no carry out of the lower 32 bits
  FSDP_HD fsdp::Words words(std::int64_t counter, int step) const {
    return fsdp::philox({static_cast<std::uint32_t>(counter) + static_cast<std::uint32_t>(step),
                         static_cast<std::uint32_t>(counter >> 32), static_cast<std::uint32_t>(sequence.id),
                         static_cast<std::uint32_t>(sequence.id >> 32)},
                        sequence.seed);
  }
  FSDP_HD bool keeps(std::uint32_t word) const { return factors.one(word) > 0.0f; }

  /// Multiplies two rows of 64 keys, as the d tiles of a warp hold them: row g and row g + 8. What is kept is a word of
  /// bits until the products are at hand: factors would take a register each.
  /// @param counter   of the first row and the group of keys
  /// @param distance  from there to the same of the second row
  FSDP_HD void apply(float (&tiles)[8][4], std::int64_t counter, std::int64_t distance, int lane) const {
    std::uint32_t kept = 0;  // bit 4 n + e
    FSDP_UNROLL_BY_4
    for (int i = 0; i < 8; ++i) {
      int const half = i / 4, high = i % 4 / 2, odd = i % 2;
      auto const w = words(counter + 2 * (lane % 4) + half * distance, 8 * high + odd);
      std::uint32_t const bits = (keeps(w.a) ? 1u : 0u) | (keeps(w.b) ? 1u << 8 : 0u) | (keeps(w.c) ? 1u << 16 : 0u) |
                                 (keeps(w.d) ? 1u << 24 : 0u);
      kept |= bits << (4 * high + odd + 2 * half);
    }
    multiply(tiles, kept);
  }
  /// Applies the mask to transposed tiles: rows are keys, columns queries.
  /// @param counter   of the first query and key g
  /// @param distance  from one query to the next
  /// @param word      which of a counter's words belongs to the keys
  template <std::size_t Columns>
  FSDP_HD std::uint32_t kept_transposed(std::int64_t counter, std::int64_t distance, int word) const {
    std::uint32_t kept = 0;  // bit 4 n + e
    FSDP_UNROLL_BY_4
    for (int i = 0; i < static_cast<int>(Columns) * 4; ++i) {
      auto const w = words(counter + (8 * (i / 4) + i % 2) * distance, i / 2 % 2 * 8);
      kept |= keeps(word == 0 ? w.a : word == 1 ? w.b : word == 2 ? w.c : w.d) ? 1u << i : 0u;
    }
    return kept;
  }
  /// Multiplies tiles by their factors. @param kept  bit 4 n + e: of tiles[n][e]
  template <std::size_t Columns>
  FSDP_HD void multiply(float (&tiles)[Columns][4], std::uint32_t kept) const {
    FSDP_UNROLL
    for (int n = 0; n < static_cast<int>(Columns); ++n) {
      FSDP_UNROLL
      for (int e = 0; e < 4; ++e) tiles[n][e] *= (kept >> (4 * n + e) & 1) != 0 ? factors.kept : 0.0f;
    }
  }
};

/// d (Stripes of 16 rows, by 8 Columns) = rows of a from `row` on, times the transpose of rows of b from `column` on.
template <class Lanes, int Width, std::size_t Stripes, std::size_t Columns>
FSDP_HD inline void product_transposed(float (&d)[Stripes][Columns][4], tile::SharedRows<Width> a, int row,
                                       tile::SharedRows<Width> b, int column, int lane) {
  FSDP_UNROLL
  for (std::size_t m = 0; m < Stripes; ++m) {
    FSDP_UNROLL
    for (auto& t : d[m]) t[0] = t[1] = t[2] = t[3] = 0.0f;
  }
  auto const left_place = tile::lane_place<Lanes>(a, row, lane);
  auto const right_place = tile::lane_place_transposed<Lanes>(b, column, lane);
  FSDP_UNROLL_BY_4  // more would load too far ahead for the registers
      for (int step = 0; step < Width / 16; ++step) {
    std::uint32_t left[Stripes][4];
    FSDP_UNROLL
    for (std::size_t m = 0; m < Stripes; ++m) tile::load_a(left[m], left_place, 16 * static_cast<int>(m), 2 * step);
    FSDP_UNROLL
    for (int pair = 0; pair < static_cast<int>(Columns) / 2; ++pair) {
      std::uint32_t right[2][2];
      tile::load_b_transposed(right[0], right[1], right_place, 16 * pair, 2 * step);
      FSDP_UNROLL
      for (std::size_t m = 0; m < Stripes; ++m) {
        tile::Tile<Lanes>::mma(d[m][2 * pair], left[m], right[0]);
        tile::Tile<Lanes>::mma(d[m][2 * pair + 1], left[m], right[1]);
      }
    }
  }
}

/// d (Stripes of 16 rows, by Width) += a (the same rows, by 8 Columns, rounded to bf16) times rows of b from `row` on.
template <class Lanes, int Width, std::size_t Stripes, std::size_t Columns>
FSDP_HD inline void add_product(float (&d)[Stripes][blocks::extent(Width / 8)][4],
                                float const (&a)[Stripes][Columns][4], tile::SharedRows<Width> b, int row, int lane) {
  auto const place = tile::lane_place<Lanes>(b, row, lane);
  FSDP_UNROLL
  for (int step = 0; step < static_cast<int>(Columns) / 2; ++step) {
    std::uint32_t left[Stripes][4];
    FSDP_UNROLL
    for (std::size_t m = 0; m < Stripes; ++m) tile::as_a(left[m], a[m][2 * step], a[m][2 * step + 1]);
    FSDP_UNROLL
    for (int pair = 0; pair < Width / 16; ++pair) {
      std::uint32_t right[2][2];
      tile::load_b(right[0], right[1], place, 16 * step, 2 * pair);
      FSDP_UNROLL
      for (std::size_t m = 0; m < Stripes; ++m) {
        tile::Tile<Lanes>::mma(d[m][2 * pair], left[m], right[0]);
        tile::Tile<Lanes>::mma(d[m][2 * pair + 1], left[m], right[1]);
      }
    }
  }
}

/// Writes a warp's 16 rows, times a factor for each half, to global memory, by way of 16 rows of shared memory that no
/// other warp uses any more. ldmatrix orders no memory: what the warp has read of these rows with it, it must have left
/// behind by a barrier.
/// @param site   of the caller, whose barrier this has
/// @param row    first of the shared rows
/// @param valid  rows that are there; the others are not written
template <int Width, class Block>
FSDP_HD inline void store_rows(Block const& block, fsdp::SyncSite site, float const (&d)[blocks::extent(Width / 8)][4],
                               float upper, float lower, tile::SharedRows<Width> staging, int row, fsdp::bf16* to,
                               std::int64_t stride, std::int64_t valid, int lane) {
  constexpr int chunks = tile::SharedRows<Width>::chunks;
  int const g = lane / 4, q = lane % 4;
  FSDP_UNROLL
  for (int column = 0; column < Width / 8; ++column) {
    auto const* t = d[column];
    reinterpret_cast<std::uint32_t*>(staging.at(row + g, column))[q] = tile::pack(t[0] * upper, t[1] * upper);
    reinterpret_cast<std::uint32_t*>(staging.at(row + g + 8, column))[q] = tile::pack(t[2] * lower, t[3] * lower);
  }
  block.sync_warp(site);  // the warp's rows are in shared memory
  FSDP_UNROLL
  for (int i = lane; i < 16 * chunks; i += 32) {
    int const r = i / chunks, chunk = i % chunks;
    if (r < valid) tile::copy_chunk(to + r * stride + chunk * 8, staging.at(row + r, chunk));
  }
}

}  // namespace flash
}  // namespace transformer
