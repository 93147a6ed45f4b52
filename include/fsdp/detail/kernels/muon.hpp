// SPDX-License-Identifier: Apache-2.0
// Kernels of Muon: momentum, the products of Newton-Schulz iterations, and the update.
#pragma once

#include <cstdint>

#include "fsdp/concepts.hpp"
#include "fsdp/detail/kernels/block.hpp"
#include "fsdp/detail/kernels/optimizers.hpp"
#include "fsdp/detail/kernels/random.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::kernels {

namespace detail {

struct MuonMomentum {
  template <class Block>
  FSDP_HD void operator()(Block const& block, std::int64_t index, OptimizerChunk const* chunks,
                          OptimizerStep const* step, SgdScalars s, float const* g, float* momentum, float* out) const {
    OptimizerStep const now = *step;
    OptimizerChunk const chunk = chunks[index];
    float const fresh = 1.0f - s.momentum, clip = now.factor;
    bool const skips = now.factor < 0.0f;
    block.update(
        chunk.count,
        [=](float& moved, float& average, float gradient) {
          if (skips) {
            moved = average;
            return;
          }
          float const slope = gradient * clip;
          average = math::mul_add(s.momentum, average, fresh * slope);
          moved = s.nesterov ? math::mul_add(s.momentum, average, fresh * slope) : average;
        },
        out + chunk.begin, momentum + chunk.begin + chunk.shift, g + chunk.begin);
  }
};

template <bool Stochastic>
struct MuonUpdate {
  template <class Block, class P>
  FSDP_HD void operator()(Block const& block, std::int64_t index, OptimizerChunk const* chunks,
                          OptimizerStep const* step, P* p, float const* moves, std::uint64_t seed) const {
    OptimizerStep const now = *step;
    if (now.factor < 0.0f) return;
    OptimizerChunk const chunk = chunks[index];
    float const keep = 1.0f - now.learning_rate * chunk.weight_decay, rate = now.learning_rate;
    auto const key = rounding::key(seed, chunk.tensor, now.taken);
    block.update(
        chunk.count,
        [=](float& param, float move, std::int64_t element) {
          param = math::mul_add(param, keep, -rate * (move + 0.0f));  // a sum over ranks has no -0
          if constexpr (Stochastic)
            param = rounding::stochastic<P>(param, static_cast<std::uint32_t>(rounding::bits(key, element) & 0xffffu));
        },
        p + chunk.begin, moves + chunk.begin, Indices{chunk.first});
  }
};

/// Rows and columns of the tiles that one block computes, and the terms that it adds in one pass.
inline constexpr std::int64_t tile_rows = 4, tile_columns = 512, tile_terms = 4;

struct Product {
  template <class Block>
  FSDP_HD void operator()(Block const& block, std::int64_t index, std::int64_t m, std::int64_t n, std::int64_t k,
                          float alpha, float const* a, float const* b, float beta, float* c) const {
    std::int64_t const tiles = (n + tile_columns - 1) / tile_columns;
    std::int64_t const row = index / tiles * tile_rows, column = index % tiles * tile_columns;
    std::int64_t const rows = m - row < tile_rows ? m - row : tile_rows;
    std::int64_t const columns = n - column < tile_columns ? n - column : tile_columns;
    float* const to = c + row * n + column;
    for (std::int64_t r = 0; r < rows; ++r) {
      if (beta == 0.0f) {
        block.each(
            columns, to + r * n, [](std::int64_t) { return 0.0f; }, Indices{});
      } else if (beta != 1.0f) {
        block.update(
            columns, [=](float& sum) { sum *= beta; }, to + r * n);
      }
    }
    std::int64_t term = 0;
    if (rows == tile_rows)
      for (; term + tile_terms <= k; term += tile_terms)
        whole(block, columns, n, k, alpha, a + row * k + term, b + term * n + column, to);
    for (; term < k; ++term) {
      for (std::int64_t r = 0; r < rows; ++r) {
        float const factor = alpha * a[(row + r) * k + term];
        block.update(
            columns, [=](float& sum, float x) { sum = math::mul_add(factor, x, sum); }, to + r * n,
            b + term * n + column);
      }
    }
  }

 private:
  /// Computes four rows of C; each step of the loop adds four terms to each sum.
  template <class Block>
  FSDP_HD static void whole(Block const& block, std::int64_t columns, std::int64_t n, std::int64_t k, float alpha,
                            float const* a, float const* b, float* to) {
    float f[tile_rows][tile_terms];
    for (std::int64_t r = 0; r < tile_rows; ++r)
      for (std::int64_t t = 0; t < tile_terms; ++t) f[r][t] = alpha * a[r * k + t];
    auto const add = [](float const* row, float sum, float x0, float x1, float x2, float x3) {
      return math::mul_add(row[3], x3,
                           math::mul_add(row[2], x2, math::mul_add(row[1], x1, math::mul_add(row[0], x0, sum))));
    };
    block.update(
        columns,
        [=](float& c0, float& c1, float& c2, float& c3, float x0, float x1, float x2, float x3) {
          c0 = add(f[0], c0, x0, x1, x2, x3);
          c1 = add(f[1], c1, x0, x1, x2, x3);
          c2 = add(f[2], c2, x0, x1, x2, x3);
          c3 = add(f[3], c3, x0, x1, x2, x3);
        },
        to, to + n, to + 2 * n, to + 3 * n, b, b + n, b + 2 * n, b + 3 * n);
  }
};

struct Transpose {
  static constexpr std::int64_t side = 32;
  template <class Block>
  FSDP_HD void operator()(Block const& block, std::int64_t index, std::int64_t rows, std::int64_t columns,
                          float const* from, float* to) const {
    std::int64_t const tiles = (columns + side - 1) / side;
    std::int64_t const row = index / tiles * side, column = index % tiles * side;
    std::int64_t const height = rows - row < side ? rows - row : side;
    std::int64_t const width = columns - column < side ? columns - column : side;
    for (std::int64_t i = block.thread(); i < height * width; i += block.threads()) {
      std::int64_t const r = row + i / width, c = column + i % width;
      to[c * rows + r] = from[r * columns + c];
    }
  }
};

struct Normalise {
  template <class Block>
  FSDP_HD void operator()(Block const& block, std::int64_t index, float* x, std::int64_t n, double const* squares,
                          float smallest, float scale) const {
    double const norm = math::sqrt(*squares), least = static_cast<double>(smallest);
    float const factor = static_cast<float>(static_cast<double>(scale) / (norm < least ? least : norm));
    std::int64_t const begin = index * chunk_elements;
    block.update(
        chunk_length(n, index), [=](float& value) { value *= factor; }, x + begin);
  }
};

}  // namespace detail

/// m = momentum * m + (1 - momentum) * g, as torch.optim.Muon; and what is to be orthogonalised of it.
/// @param out  the momentum; with Nesterov, momentum * m + (1 - momentum) * g. Chunks begin at `begin`
template <Device D>
void muon_momentum(D const& device, typename D::Stream& stream, OptimizerChunk const* chunks, std::int64_t chunk_count,
                   OptimizerStep const* step, SgdScalars scalars, float const* g, float* momentum, float* out) {
  if (chunk_count > 0)
    device.launch(stream, chunk_count, detail::MuonMomentum{}, chunks, step, scalars, g, momentum, out);
}

/// p = (1 - lr * weight_decay) * p - lr * moves. Chunks of both begin at `begin`.
template <bool Stochastic = false, Device D, class P>
void muon_update(D const& device, typename D::Stream& stream, OptimizerChunk const* chunks, std::int64_t chunk_count,
                 OptimizerStep const* step, P* p, float const* moves, std::uint64_t seed = 0) {
  if (chunk_count > 0)
    device.launch(stream, chunk_count, detail::MuonUpdate<Stochastic>{}, chunks, step, p, moves, seed);
}

/// C = alpha A B + beta C, of dense row-major matrices: A is (m, k), B (k, n), C (m, n) and apart from both. If beta is
/// 0, C is not read. Each element is a sum in the order of k.
template <Device D>
void product(D const& device, typename D::Stream& stream, std::int64_t m, std::int64_t n, std::int64_t k, float alpha,
             float const* a, float const* b, float beta, float* c) {
  auto const tiles = [](std::int64_t extent, std::int64_t tile) { return (extent + tile - 1) / tile; };
  auto const blocks = tiles(m, detail::tile_rows) * tiles(n, detail::tile_columns);
  if (blocks > 0) device.launch(stream, blocks, detail::Product{}, m, n, k, alpha, a, b, beta, c);
}

/// to[c][r] = from[r][c]
template <Device D>
void transpose(D const& device, typename D::Stream& stream, std::int64_t rows, std::int64_t columns, float const* from,
               float* to) {
  auto const tiles = [](std::int64_t extent) {
    return (extent + detail::Transpose::side - 1) / detail::Transpose::side;
  };
  auto const blocks = tiles(rows) * tiles(columns);
  if (blocks > 0) device.launch(stream, blocks, detail::Transpose{}, rows, columns, from, to);
}

/// x *= scale / max(sqrt(*squares), smallest)
template <Device D>
void normalise(D const& device, typename D::Stream& stream, float* x, std::int64_t n, double const* squares,
               float smallest, float scale = 1.0f) {
  if (n > 0) device.launch(stream, detail::blocks_for(n), detail::Normalise{}, x, n, squares, smallest, scale);
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::kernels
