// SPDX-License-Identifier: Apache-2.0
// Flash attention, backward: the gradient of the queries, then those of the keys and values.
#pragma once

#include "transformer/attention/flash_common.hpp"

namespace transformer::flash {

/// Arguments of backward. Statistics lie as FlashShape::statistics_rows says.
struct BackwardArgs {
  fsdp::bf16 const* qkv;             // (B, n, 3C)
  fsdp::bf16 const* mixed;           // (B, n, C): the result of forward
  fsdp::bf16 const* mixed_gradient;  // (B, n, C)
  float const* log_sums;             // of forward
  float* products;                   // for each row: its gradient times its result, summed
  fsdp::bf16* qkv_gradient;          // (B, n, 3C)
};

/// The probability of a score: never above 1, whatever rounding did to the two.
template <class Lanes>
FSDP_HD inline float probability(float score, float factor, float log_sum) {
  float const exponent = fsdp::math::mul_add(score, factor, -log_sum);
  return tile::Tile<Lanes>::exp2(exponent < 0.0f ? exponent : 0.0f);
}

/// Tile, sequence and head of a thread block. Blocks of one tile, for all sequences' heads, come one after another.
struct BlockPlace {
  int tile, in_batch, head;

  FSDP_HD BlockPlace(FlashShape const& s, std::int64_t index)
      : tile(static_cast<int>(index / (s.batch * s.heads))),
        in_batch(static_cast<int>(index % (s.batch * s.heads) / s.heads)),
        head(static_cast<int>(index % s.heads)) {}
};

/// A block of backward: four warps of 16 rows each, one tile of a head.
template <int Size>
struct Backward {
  static constexpr int warps = 4;
  static constexpr int threads = 32 * warps;
  using Rows = tile::SharedRows<Size>;
  static constexpr int blocks_per_multiprocessor = 2;

  FSDP_HD static int tiles(FlashShape const& s) { return static_cast<int>(s.statistics_rows() / tile_rows); }
  static std::int64_t blocks(FlashShape const& s) { return tiles(s) * s.batch * s.heads; }
};

/// dQ of a tile of 64 queries, and `products` of its rows. It runs before BackwardKeys.
template <int Size, bool Dropped>
struct BackwardQueries : Backward<Size> {
  using Backward<Size>::threads;
  using typename Backward<Size>::Rows;
  static constexpr std::size_t shared_bytes = Rows::bytes(6 * tile_rows);

  template <class Block>
  FSDP_HD void operator()(Block const& block, std::int64_t index, FlashShape s, DropoutMask mask,
                          BackwardArgs args) const {
    using Lanes = typename Block::Lanes;
    using Tile = tile::Tile<Lanes>;
    int const lane = block.thread() % 32, row = 16 * (block.thread() / 32);
    int const g = lane / 4, q = lane % 4;

    BlockPlace const place(s, index);
    auto const in_batch = place.in_batch, head = place.head;
    int const query_tile = Backward<Size>::tiles(s) - 1 - place.tile;  // long rows first
    std::int64_t const first = std::int64_t{query_tile} * tile_rows;
    auto const from = packed(s, args.qkv, in_batch, head, Size);
    auto const* const result = rows_of(s, args.mixed, in_batch, head, Size);
    auto const* const up = rows_of(s, args.mixed_gradient, in_batch, head, Size);

    auto* const memory = reinterpret_cast<fsdp::bf16*>(block.shared());
    Rows const queries{memory}, gradients{memory + tile_rows * Size};
    auto const key_rows = [&](int t) { return Rows{memory + (2 + t % 2 * 2) * tile_rows * Size}; };
    auto const value_rows = [&](int t) { return Rows{memory + (3 + t % 2 * 2) * tile_rows * Size}; };
    auto const fetch = [&](int t) {
      std::int64_t const key = std::int64_t{t} * tile_rows;
      tile::copy_rows<tile_rows, threads>(block, key_rows(t), from.key + key * from.stride, from.stride,
                                          s.length - key);
      tile::copy_rows<tile_rows, threads>(block, value_rows(t), from.value + key * from.stride, from.stride,
                                          s.length - key);
      Tile::commit();
    };
    tile::copy_rows<tile_rows, threads>(block, queries, from.query + first * from.stride, from.stride,
                                        s.length - first);
    tile::copy_rows<tile_rows, threads>(block, gradients, up + first * s.width, s.width, s.length - first);
    fetch(0);
    Tile::template wait<0>();
    block.sync();  // the queries and the first keys are there

    // Statistics of the lane's two rows. A row's product is also the sum of its probabilities times their slopes: the
    // first rows, whose few keys weigh much, have it from there, without the rounding of the result.
    std::int64_t const at = (in_batch * s.heads + head) * s.statistics_rows() + first + row + g;
    float const factor = s.scale * log2_e;
    float log_sum[2], product[2] = {};
    FSDP_UNROLL
    for (int half = 0; half < 2; ++half) {
      std::int64_t const query = first + row + g + 8 * half;
      log_sum[half] = args.log_sums[at + 8 * half];
      if (query_tile > 0)
        product[half] =
            row_sum(block, query < s.length ? dot(gradients, row + g + 8 * half, result + query * s.width, q) : 0.0f);
    }

    float out[1][blocks::extent(Size / 8)][4] = {};
    for (int t = 0; t <= query_tile; ++t) {
      if (t < query_tile) fetch(t + 1);
      float scores[1][8][4], slopes[1][8][4];
      product_transposed<Lanes>(scores, queries, row, key_rows(t), 0, lane);
      product_transposed<Lanes>(slopes, gradients, row, value_rows(t), 0, lane);
      if constexpr (Dropped) {
        ScoreMask(mask).apply(slopes[0], s.mask_counter(in_batch, head, first + row + g, t), 8 * s.mask_counters(),
                              lane);
      }
      FSDP_UNROLL
      for (int n = 0; n < 8; ++n) {
        FSDP_UNROLL
        for (int e = 0; e < 4; ++e) {
          bool const seen = t < query_tile || 8 * n + 2 * q + e % 2 <= row + g + e / 2 * 8;
          scores[0][n][e] = seen ? probability<Lanes>(scores[0][n][e], factor, log_sum[e / 2]) : 0.0f;
          if (query_tile == 0) product[e / 2] += scores[0][n][e] * slopes[0][n][e];
        }
      }
      FSDP_UNROLL
      for (int half = 0; half < 2; ++half) {
        if (query_tile == 0) product[half] = row_sum(block, product[half]);
        if (t == query_tile && q == 0) args.products[at + 8 * half] = product[half];
      }
      FSDP_UNROLL
      for (int n = 0; n < 8; ++n) {
        FSDP_UNROLL
        for (int e = 0; e < 4; ++e) slopes[0][n][e] = scores[0][n][e] * (slopes[0][n][e] - product[e / 2]);
      }
      add_product<Lanes>(out, slopes, key_rows(t), 0, lane);
      if (t < query_tile) {
        Tile::template wait<0>();
        block.sync();  // the next keys are there and the last are read
      }
    }

    auto const to = packed(s, args.qkv_gradient, in_batch, head, Size);
    block.sync_warp();  // the warp has read its queries, whose rows store_rows takes
    store_rows<Size>(block, fsdp::SyncSite::here(), out[0], s.scale, s.scale, queries, row,
                     to.query + (first + row) * to.stride, to.stride, s.length - first - row, lane);
  }

 private:
  /// A quarter of a row's products of gradient and result: every fourth chunk from q on.
  FSDP_HD static float dot(Rows gradients, int row, fsdp::bf16 const* result, int q) {
    float sum = 0.0f;
    FSDP_UNROLL
    for (int chunk = q; chunk < Rows::chunks; chunk += 4) {
      alignas(16) fsdp::bf16 other[8];
      tile::copy_chunk(other, result + chunk * 8);
      auto const* const own = gradients.at(row, chunk);
      FSDP_UNROLL
      for (int i = 0; i < 8; ++i) sum += static_cast<float>(own[i]) * static_cast<float>(other[i]);
    }
    return sum;
  }
};

/// dK and dV of a tile of 64 keys. Scores are computed transposed, keys by queries, so that they stay in registers.
template <int Size, bool Dropped>
struct BackwardKeys : Backward<Size> {
  using Backward<Size>::threads;
  using typename Backward<Size>::Rows;
  /// Queries at a time: what registers have room for.
  static constexpr int columns = Size == 128 ? 16 : Dropped ? 32 : 64;
  static constexpr std::size_t statistics_bytes = 2 * 2 * tile_rows * sizeof(float);
  static constexpr std::size_t shared_bytes = Rows::bytes(6 * tile_rows) + statistics_bytes;

  template <class Block>
  FSDP_HD void operator()(Block const& block, std::int64_t index, FlashShape s, DropoutMask mask,
                          BackwardArgs args) const {
    using Lanes = typename Block::Lanes;
    using Tile = tile::Tile<Lanes>;
    int const lane = block.thread() % 32, row = 16 * (block.thread() / 32);
    int const g = lane / 4, q = lane % 4;

    BlockPlace const place(s, index);
    auto const in_batch = place.in_batch, head = place.head;
    int const tiles = Backward<Size>::tiles(s), key_tile = place.tile;  // the first keys have the most queries
    std::int64_t const first = std::int64_t{key_tile} * tile_rows;
    auto const from = packed(s, args.qkv, in_batch, head, Size);
    auto const* const up = rows_of(s, args.mixed_gradient, in_batch, head, Size);
    std::int64_t const statistics = (in_batch * s.heads + head) * s.statistics_rows();

    auto* const memory = reinterpret_cast<fsdp::bf16*>(block.shared());
    Rows const keys{memory}, values{memory + tile_rows * Size};
    auto const query_rows = [&](int t) { return Rows{memory + (2 + t % 2 * 2) * tile_rows * Size}; };
    auto const gradient_rows = [&](int t) { return Rows{memory + (3 + t % 2 * 2) * tile_rows * Size}; };
    auto* const rows_statistics = reinterpret_cast<float*>(memory + 6 * tile_rows * Size);
    auto const log_sums = [&](int t) { return rows_statistics + t % 2 * 2 * tile_rows; };
    auto const products = [&](int t) { return rows_statistics + (t % 2 * 2 + 1) * tile_rows; };
    auto const fetch = [&](int t) {
      std::int64_t const query = std::int64_t{t} * tile_rows;
      tile::copy_rows<tile_rows, threads>(block, query_rows(t), from.query + query * from.stride, from.stride,
                                          s.length - query);
      tile::copy_rows<tile_rows, threads>(block, gradient_rows(t), up + query * s.width, s.width, s.length - query);
      if (block.thread() < 32) {
        int const part = lane % 16 * 4;
        auto const at = statistics + query + part;
        Tile::copy_async(Tile::address((lane < 16 ? log_sums(t) : products(t)) + part),
                         (lane < 16 ? args.log_sums : args.products) + at, true);
      }
      Tile::commit();
    };
    tile::copy_rows<tile_rows, threads>(block, keys, from.key + first * from.stride, from.stride, s.length - first);
    tile::copy_rows<tile_rows, threads>(block, values, from.value + first * from.stride, from.stride, s.length - first);
    fetch(key_tile);
    Tile::template wait<0>();
    block.sync();  // the keys and the first queries are there

    float const factor = s.scale * log2_e;
    float key_gradient[1][blocks::extent(Size / 8)][4] = {}, value_gradient[1][blocks::extent(Size / 8)][4] = {};
    for (int t = key_tile; t < tiles; ++t) {
      if (t + 1 < tiles) fetch(t + 1);
      ScoreMask const factors(mask);
      std::uint32_t tile_bits = 0;  // bit column / 2 + 4 n + e
      if constexpr (Dropped)
        tile_bits = factors.template kept_transposed<tile_rows / 8>(
            s.mask_counter(in_batch, head, std::int64_t{t} * tile_rows + 2 * q, key_tile) + g, s.mask_counters(),
            row / 16);
      FSDP_ROLLED  // two parts at once need more registers than there are
          for (int column = 0; column < tile_rows; column += columns) {
        float scores[1][blocks::extent(columns / 8)][4],
            slopes[1][blocks::extent(columns / 8)][4];  // rows are keys, columns queries
        std::uint32_t const kept_bits = tile_bits >> (column / 2);
        product_transposed<Lanes>(scores, keys, row, query_rows(t), column, lane);
        FSDP_UNROLL
        for (int n = 0; n < columns / 8; ++n) {
          FSDP_UNROLL
          for (int e = 0; e < 4; ++e) {
            int const query = column + 8 * n + 2 * q + e % 2;
            bool const seen = t > key_tile || row + g + e / 2 * 8 <= query;
            scores[0][n][e] = seen ? probability<Lanes>(scores[0][n][e], factor, log_sums(t)[query]) : 0.0f;
          }
        }
        product_transposed<Lanes>(slopes, values, row, gradient_rows(t), column, lane);
        if constexpr (Dropped) factors.multiply(slopes[0], kept_bits);
        FSDP_UNROLL
        for (int n = 0; n < columns / 8; ++n) {
          FSDP_UNROLL
          for (int e = 0; e < 4; ++e)
            slopes[0][n][e] = scores[0][n][e] * (slopes[0][n][e] - products(t)[column + 8 * n + 2 * q + e % 2]);
        }
        if constexpr (Dropped) factors.multiply(scores[0], kept_bits);
        add_product<Lanes>(value_gradient, scores, gradient_rows(t), column, lane);
        add_product<Lanes>(key_gradient, slopes, query_rows(t), column, lane);
      }
      if (t + 1 < tiles) {
        Tile::template wait<0>();
        block.sync();  // the next queries are there and the last are read
      }
    }

    auto const to = packed(s, args.qkv_gradient, in_batch, head, Size);
    std::int64_t const valid = s.length - first - row, offset = (first + row) * to.stride;
    block.sync_warp();  // the warp has read its keys and values, whose rows store_rows takes
    store_rows<Size>(block, fsdp::SyncSite::here(), key_gradient[0], s.scale, s.scale, keys, row, to.key + offset,
                     to.stride, valid, lane);
    store_rows<Size>(block, fsdp::SyncSite::here(), value_gradient[0], 1.0f, 1.0f, values, row, to.value + offset,
                     to.stride, valid, lane);
  }
};

}  // namespace transformer::flash
