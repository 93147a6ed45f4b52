// SPDX-License-Identifier: Apache-2.0
// LayerNorm for thread blocks alone: a row is read once and stays in registers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "transformer/kernels/column_sums.hpp"
#include "transformer/kernels/common.hpp"
#include "transformer/kernels/packs.hpp"

namespace transformer::blocks {

using fsdp::Pair;

/// Arguments of LayerNormRows. sum = residual + (x + bias) where there is a residual, else x; y = norm(sum).
template <class A>
struct LayerNormArgs {
  A const *x, *residual;  // (rows, columns); residual may be null
  A const* bias;          // (columns) of x, or null
  A* sum;                 // (rows, columns); written if there is a residual
  A const *weight, *norm_bias;
  A* y;
  Compute<A>*mean, *scale;  // (rows), or both null
  std::int64_t rows, columns;
  Compute<A> epsilon;
};

/// LayerNorm forward, a warp for a row, with the residual addition before it.
/// @tparam Packs  that a lane holds: rows of at most 32 Packs packs
template <int Packs>
struct LayerNormRows {
  static constexpr int threads = 256;
  static constexpr std::int64_t rows_per_block = 8;

  template <class Block, class A>
  FSDP_HD void operator()(Block const& block, std::int64_t index, LayerNormArgs<A> const args) const {
    using T = Compute<A>;
    constexpr int count = pack_elements<A>;
    int const lane = block.thread() % 32;
    std::int64_t const row = index * rows_per_block + block.thread() / 32;
    if (row >= args.rows) return;  // a whole warp
    A const* const x = args.x + row * args.columns;

    T value[extent(Packs)][extent(count)];
    T total = 0;
    FSDP_UNROLL
    for (int p = 0; p < Packs; ++p) {
      std::int64_t const column = (32 * p + lane) * count;
      bool const there = column < args.columns;
      auto const own = there ? load(x + column) : Pack<A>{};
      if (args.residual != nullptr && there) {
        auto const other = load(args.residual + row * args.columns + column);
        auto const bias = args.bias != nullptr ? load(args.bias + column) : Pack<A>{};
        Pack<A> sum;
        FSDP_UNROLL
        for (int k = 0; k < count; ++k) {
          T const branch = fsdp::widen(own.element[k]) + fsdp::widen(bias.element[k]);
          sum.element[k] = fsdp::narrow<A>(fsdp::widen(other.element[k]) + branch);
          value[p][k] = fsdp::widen(sum.element[k]);
        }
        store(args.sum + row * args.columns + column, sum);
      } else {
        FSDP_UNROLL
        for (int k = 0; k < count; ++k) value[p][k] = there ? fsdp::widen(own.element[k]) : T(0);
      }
      FSDP_UNROLL
      for (int k = 0; k < count; ++k) total += value[p][k];
    }
    T const m = sum_of_warp(block, total) / static_cast<T>(args.columns);
    T squares = 0;
    FSDP_UNROLL
    for (int p = 0; p < Packs; ++p) {
      bool const there = (32 * p + lane) * count < args.columns;
      FSDP_UNROLL
      for (int k = 0; k < count; ++k) squares += there ? (value[p][k] - m) * (value[p][k] - m) : T(0);
    }
    T const s = T(1) / fsdp::math::sqrt(sum_of_warp(block, squares) / static_cast<T>(args.columns) + args.epsilon);
    if (lane == 0 && args.mean != nullptr) {
      args.mean[row] = m;
      args.scale[row] = s;
    }
    FSDP_UNROLL
    for (int p = 0; p < Packs; ++p) {
      std::int64_t const column = (32 * p + lane) * count;
      if (column >= args.columns) continue;
      auto const weight = load(args.weight + column);
      auto const bias = args.norm_bias != nullptr ? load(args.norm_bias + column) : Pack<A>{};
      Pack<A> y;
      FSDP_UNROLL
      for (int k = 0; k < count; ++k) {
        y.element[k] =
            fsdp::narrow<A>((value[p][k] - m) * s * fsdp::widen(weight.element[k]) + fsdp::widen(bias.element[k]));
      }
      store(args.y + row * args.columns + column, y);
    }
  }

 private:
  template <class Block, class T>
  FSDP_HD static T sum_of_warp(Block const& block, T value) {
    FSDP_UNROLL
    for (int mask = 16; mask > 0; mask /= 2) value += block.shuffle_xor(value, mask);
    return value;
  }
};

/// LayerNorm backward of one chunk of rows: a thread keeps one pack of columns of all its rows, and with them the sums
/// for weight and bias, which it writes once at the end: partials (chunks, 2, columns).
/// @tparam Threads  at least columns / pack_elements<A>
template <int Threads>
struct LayerNormRowsBackward {
  static constexpr int threads = Threads;
  /// Rows at a time, for as many loads on their way as registers hold.
  static constexpr int together = Threads <= 256 ? 4 : 2;
  static constexpr int warps = Threads / 32;
  static constexpr std::size_t shared_bytes = 2 * together * warps * 16;

  template <class Block, class A>
  FSDP_HD void operator()(Block const& block, std::int64_t chunk, A const* dy, A const* x, A const* weight,
                          Compute<A> const* mean, Compute<A> const* scale, A const* add, A* dx, std::int64_t rows,
                          std::int64_t columns, Compute<A>* partials) const {
    using T = Compute<A>;
    constexpr int count = pack_elements<A>;
    int const lane = block.thread() % 32, warp = block.thread() / 32;
    std::int64_t const column = std::int64_t{block.thread()} * count;
    bool const there = column < columns;
    auto* const slots = reinterpret_cast<Pair<T>*>(block.shared());
    T const size = static_cast<T>(columns);

    auto const weights = there ? load(weight + column) : Pack<A>{};
    T w[extent(count)], weight_sum[extent(count)], bias_sum[extent(count)];
    FSDP_UNROLL
    for (int k = 0; k < count; ++k) {
      w[k] = fsdp::widen(weights.element[k]);
      weight_sum[k] = bias_sum[k] = T(0);
    }
    std::int64_t const begin = chunk * detail::rows_per_chunk;
    std::int64_t const end = rows < begin + detail::rows_per_chunk ? rows : begin + detail::rows_per_chunk;
    int turn = 0;
    for (std::int64_t first = begin; first < end; first += together, turn ^= 1) {
      Pack<A> up[extent(together)], in[extent(together)];
      T m[extent(together)], s[extent(together)];
      FSDP_UNROLL
      for (int r = 0; r < together; ++r) {
        bool const counts = there && first + r < end;
        std::int64_t const row = first + r < end ? first + r : first;
        up[r] = counts ? load(dy + row * columns + column) : Pack<A>{};
        in[r] = counts ? load(x + row * columns + column) : Pack<A>{};
        m[r] = mean[row];
        s[r] = scale[row];
      }
      Pair<T> sums[extent(together)];
      FSDP_UNROLL
      for (int r = 0; r < together; ++r) {
        sums[r] = {T(0), T(0)};
        FSDP_UNROLL
        for (int k = 0; k < count; ++k) {
          T const g = fsdp::widen(up[r].element[k]), product = g * w[k];
          sums[r].first += product;
          sums[r].second += product * ((fsdp::widen(in[r].element[k]) - m[r]) * s[r]);
        }
        FSDP_UNROLL
        for (int mask = 16; mask > 0; mask /= 2) {
          sums[r].first += block.shuffle_xor(sums[r].first, mask);
          sums[r].second += block.shuffle_xor(sums[r].second, mask);
        }
      }
      // Two sets of slots in turn: who writes a set has passed the barrier behind which the last of it was read.
      auto* const now = slots + turn * together * warps;
      if (lane == 0) {
        FSDP_UNROLL
        for (int r = 0; r < together; ++r) now[r * warps + warp] = sums[r];
      }
      block.sync();  // the warps' sums of these rows are in their slots
      FSDP_UNROLL
      for (int r = 0; r < together; ++r) {
        Pair<T> total{T(0), T(0)};
        FSDP_UNROLL
        for (int i = 0; i < warps; ++i) {
          total.first += now[r * warps + i].first;
          total.second += now[r * warps + i].second;
        }
        std::int64_t const row = first + r;
        if (!there || row >= end) continue;
        T const a = total.first / size, b = total.second / size;
        auto const past = add != nullptr ? load(add + row * columns + column) : Pack<A>{};
        Pack<A> out;
        FSDP_UNROLL
        for (int k = 0; k < count; ++k) {
          T const g = fsdp::widen(up[r].element[k]), normal = (fsdp::widen(in[r].element[k]) - m[r]) * s[r];
          weight_sum[k] += g * normal;
          bias_sum[k] += g;
          T const own = s[r] * (g * w[k] - a - normal * b);
          out.element[k] = fsdp::narrow<A>(add != nullptr ? fsdp::widen(past.element[k]) + own : own);
        }
        store(dx + row * columns + column, out);
      }
    }
    if (!there) return;
    T* const sum = partials + chunk * 2 * columns + column;
    FSDP_UNROLL
    for (int k = 0; k < count; ++k) {
      sum[k] = weight_sum[k];
      sum[columns + k] = bias_sum[k];
    }
  }
};

/// Launches LayerNormRows. @return false if the shape or the alignment is not for it
template <fsdp::Device D, class A>
bool layer_norm_rows(D const& device, typename D::Stream& stream, LayerNormArgs<A> const& args) {
  if (!in_packs<A>(args.columns, args.x, args.residual, args.bias, args.sum, args.weight, args.norm_bias, args.y))
    return false;
  std::int64_t const packs = (args.columns / pack_elements<A> + 31) / 32;
  auto const run = [&](auto kernel) {
    device.launch(stream, (args.rows + kernel.rows_per_block - 1) / kernel.rows_per_block, kernel, args);
    return true;
  };
  if (packs <= 2) return run(LayerNormRows<2>{});
  if (packs <= 4) return run(LayerNormRows<4>{});
  if (packs <= 8) return run(LayerNormRows<8>{});
  return false;
}

/// Launches LayerNormRowsBackward. @return false if the shape or the alignment is not for it
template <fsdp::Device D, class A>
bool layer_norm_rows_backward(D const& device, typename D::Stream& stream, A const* dy, A const* x, A const* weight,
                              Compute<A> const* mean, Compute<A> const* scale, A const* add, A* dx, std::int64_t rows,
                              std::int64_t columns, Compute<A>* partials) {
  if (!in_packs<A>(columns, dy, x, weight, add, dx)) return false;
  auto const packs = columns / pack_elements<A>;
  auto const run = [&](auto kernel) {
    device.launch(stream, detail::row_chunks(rows), kernel, dy, x, weight, mean, scale, add, dx, rows, columns,
                  partials);
    return true;
  };
  if (packs <= 128) return run(LayerNormRowsBackward<128>{});
  if (packs <= 256) return run(LayerNormRowsBackward<256>{});
  if (packs <= 512) return run(LayerNormRowsBackward<512>{});
  return false;
}

}  // namespace transformer::blocks
