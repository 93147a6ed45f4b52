// SPDX-License-Identifier: Apache-2.0
// Flash attention, forward: softmax(mask(Q K^T scale)) V, one block for a tile of queries of one head.
#pragma once

#include "transformer/attention/flash_common.hpp"

namespace transformer::flash {

/// @tparam Size     head size, 64 or 128
/// @tparam Dropped  whether there is dropout
template <int Size, bool Dropped>
struct Forward {
  static constexpr int stripes = Size == 64 && !Dropped ? 2 : 1;  // of 16 rows, a warp
  static constexpr int warps = 8 / stripes;
  static constexpr int threads = 32 * warps;
  static constexpr int rows = 16 * stripes * warps;
  using Rows = tile::SharedRows<Size>;
  static constexpr std::size_t shared_bytes = Rows::bytes(rows + 4 * tile_rows);
  static constexpr int blocks_per_multiprocessor = stripes == 2 ? 2 : 1;

  static std::int64_t blocks(FlashShape const& s) { return (s.length + rows - 1) / rows * s.batch * s.heads; }

  template <class Block>
  FSDP_HD void operator()(Block const& block, std::int64_t index, FlashShape s, DropoutMask mask, fsdp::bf16 const* qkv,
                          fsdp::bf16* mixed, float* log_sums) const {
    using Lanes = typename Block::Lanes;
    using Tile = tile::Tile<Lanes>;
    int const lane = block.thread() % 32, warp = block.thread() / 32;
    int const g = lane / 4, q = lane % 4;

    // Long rows first: the last blocks to start are short ones.
    std::int64_t const tiles = (s.length + rows - 1) / rows;
    std::int64_t const first = (tiles - 1 - index / (s.batch * s.heads)) * rows;
    std::int64_t const in_batch = index % (s.batch * s.heads) / s.heads, head = index % s.heads;
    auto const from = packed(s, qkv, in_batch, head, Size);
    std::int64_t const keys = s.position + s.length;
    std::int64_t const last_query = s.position + (first + rows < s.length ? first + rows : s.length) - 1;
    int const key_tiles = static_cast<int>(last_query / tile_rows) + 1;

    auto* const memory = reinterpret_cast<fsdp::bf16*>(block.shared());
    Rows const queries{memory};
    auto const stage = [&](int t) { return Rows{memory + (rows + t % 2 * 2 * tile_rows) * Size}; };
    auto const values_of = [](Rows keys_of_stage) { return Rows{keys_of_stage.base + tile_rows * Size}; };
    auto const fetch = [&](int t) {
      std::int64_t const key = std::int64_t{t} * tile_rows;
      auto const to = stage(t);
      tile::copy_rows<tile_rows, threads>(block, to, from.key + key * from.stride, from.stride, keys - key);
      tile::copy_rows<tile_rows, threads>(block, values_of(to), from.value + key * from.stride, from.stride,
                                          keys - key);
      Tile::commit();
    };
    tile::copy_rows<rows, threads>(block, queries, from.query + (s.position + first) * from.stride, from.stride,
                                   s.length - first);
    fetch(0);
    Tile::template wait<0>();
    block.sync();  // the queries and the first keys are there

    int const row = 16 * stripes * warp;  // the warp's first, in the tile
    float out[blocks::extent(stripes)][blocks::extent(Size / 8)][4] = {};
    float largest[blocks::extent(stripes)][2],
        sum[blocks::extent(stripes)][2] = {};  // of rows g and g + 8; the sum is this lane's part
    FSDP_UNROLL
    for (auto& two : largest) two[0] = two[1] = minus_infinity;
    float const factor = s.scale * log2_e;

    for (int t = 0; t < key_tiles; ++t) {
      if (t + 1 < key_tiles) fetch(t + 1);
      int const key = t * tile_rows, top = static_cast<int>(s.position + first) + row;  // the warp's first query
      if (key <= top + 16 * stripes - 1) {  // else the warp sees none of these keys
        auto const key_rows = stage(t);
        float scores[blocks::extent(stripes)][8][4];
        product_transposed<Lanes>(scores, queries, row, key_rows, 0, lane);
        FSDP_UNROLL
        for (int m = 0; m < stripes; ++m) {
          int const upper = top + 16 * m + g;
          if (key + tile_rows - 1 > top + 16 * m) hide(scores[m], upper - key, q);
          FSDP_UNROLL
          for (int half = 0; half < 2; ++half)
            advance(block, scores[m], out[m], half, factor, largest[m][half], sum[m][half]);
          if constexpr (Dropped)
            ScoreMask(mask).apply(scores[m], s.mask_counter(in_batch, head, upper, t), 8 * s.mask_counters(), lane);
        }
        add_product<Lanes>(out, scores, values_of(key_rows), 0, lane);
      }
      if (t + 1 < key_tiles) {
        Tile::template wait<0>();
        block.sync();  // the next keys are there and the last are read
      }
    }

    auto* const to = rows_of(s, mixed, in_batch, head, Size);
    std::int64_t const pitch = s.statistics_rows();
    block.sync_warp();  // the warp has read its queries, whose rows store_rows takes
    FSDP_UNROLL
    for (int m = 0; m < stripes; ++m) {
      float const upper = row_sum(block, sum[m][0]), lower = row_sum(block, sum[m][1]);
      std::int64_t const begin = first + row + 16 * m;
      if (log_sums != nullptr && q == 0) {
        float* const at = log_sums + (in_batch * s.heads + head) * pitch + begin + g;
        if (begin + g < pitch) at[0] = largest[m][0] * factor + Tile::log2(upper);
        if (begin + g + 8 < pitch) at[8] = largest[m][1] * factor + Tile::log2(lower);
      }
      store_rows<Size>(block, fsdp::SyncSite::here(), out[m], 1.0f / upper, 1.0f / lower, queries, row + 16 * m,
                       to + begin * s.width, s.width, s.length - begin, lane);
    }
  }

 private:
  /// Takes keys after the query out: those of row g beyond `last`, of row g + 8 beyond last + 8.
  FSDP_HD static void hide(float (&scores)[8][4], int last, int q) {
    FSDP_UNROLL
    for (int n = 0; n < 8; ++n) {
      FSDP_UNROLL
      for (int e = 0; e < 4; ++e) {
        if (8 * n + 2 * q + e % 2 > last + e / 2 * 8) scores[n][e] = minus_infinity;
      }
    }
  }

  /// One row's scores become exponentials relative to the largest so far; what is summed already follows it.
  /// The first tile has a visible key for every row, so the largest is never -infinity afterwards.
  template <class Block>
  FSDP_HD static void advance(Block const& block, float (&scores)[8][4], float (&out)[blocks::extent(Size / 8)][4],
                              int half, float factor, float& largest, float& sum) {
    using Tile = tile::Tile<typename Block::Lanes>;
    int const e = 2 * half;
    float peak = largest;
    FSDP_UNROLL
    for (auto& t : scores) {
      peak = peak < t[e] ? t[e] : peak;
      peak = peak < t[e + 1] ? t[e + 1] : peak;
    }
    peak = row_max(block, peak);
    float const shrink = Tile::exp2((largest - peak) * factor);
    largest = peak;
    sum *= shrink;
    FSDP_UNROLL
    for (auto& t : out) t[e] *= shrink, t[e + 1] *= shrink;
    FSDP_UNROLL
    for (auto& t : scores) {  // the difference first: 1 for the largest, however large it is
      t[e] = Tile::exp2((t[e] - peak) * factor);
      t[e + 1] = Tile::exp2((t[e + 1] - peak) * factor);
      sum += t[e] + t[e + 1];
    }
  }
};

}  // namespace transformer::flash
