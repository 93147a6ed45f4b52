// SPDX-License-Identifier: Apache-2.0
// RMSNorm over rows (Zhang, Sennrich, arXiv:1910.07467), forward and backward.
#pragma once

#include <cstdint>

#include "transformer/kernels/column_sums.hpp"
#include "transformer/kernels/common.hpp"

namespace transformer {

namespace detail {

/// The part of forward behind the row's values: its statistic, and y = x * scale * weight.
/// @pre the block's threads agree with `sum` on who handles an element of x, or see each other's writes to x
template <class Block, class A, class W>
FSDP_HD inline void rms_normalise(Block const& block, std::int64_t row, A const* x, W const* weight, A* y,
                                  Compute<A>* scale, std::int64_t columns, Compute<A> epsilon) {
  using T = Compute<A>;
  T const squares = block.sum(
      columns, [](T v) { return v * v; }, x);
  T const s = T(1) / fsdp::math::sqrt(squares / static_cast<T>(columns) + epsilon);
  if (block.thread() == 0 && scale != nullptr) scale[row] = s;
  block.each(
      columns, y, [=](T v, T w) { return v * s * w; }, x, weight);
}

struct RmsNormForward {
  template <class Block, class A, class W>
  FSDP_HD void operator()(Block const& block, std::int64_t row, A const* x, W const* weight, A* y, Compute<A>* scale,
                          std::int64_t columns, Compute<A> epsilon) const {
    rms_normalise(block, row, x + row * columns, weight, y + row * columns, scale, columns, epsilon);
  }
};

struct ResidualRmsNormForward {
  template <class Block, class A, class W>
  FSDP_HD void operator()(Block const& block, std::int64_t row, A const* residual, A const* x, A* sum, W const* weight,
                          A* y, Compute<A>* scale, std::int64_t columns, Compute<A> epsilon) const {
    using T = Compute<A>;
    A* const out = sum + row * columns;
    block.each(
        columns, out, [](T r, T v) { return r + v; }, residual + row * columns, x + row * columns);
    rms_normalise(block, row, static_cast<A const*>(out), weight, y + row * columns, scale, columns, epsilon);
  }
};

/// mean over the columns of dy * weight * normalised x: by so much of the normalised x the input's gradient is smaller.
template <class Block, class A, class W>
FSDP_HD inline Compute<A> rms_projection(Block const& block, A const* dy, A const* x, W const* weight, Compute<A> scale,
                                         std::int64_t columns) {
  using T = Compute<A>;
  T const sum = block.sum(
      columns, [=](T g, T v, T w) { return g * w * (v * scale); }, dy, x, weight);
  return sum / static_cast<T>(columns);
}

/// One chunk of rows: gradients of the inputs, and partial sums (columns) for the weight.
struct RmsNormBackward {
  static constexpr int blocks_per_multiprocessor = 4;
  template <class Block, class A, class W>
  FSDP_HD void operator()(Block const& block, std::int64_t chunk, A const* dy, A const* x, W const* weight,
                          Compute<A> const* scale, A const* add, A* dx, std::int64_t rows, std::int64_t columns,
                          Compute<A>* partials) const {
    using T = Compute<A>;
    T* const weight_sum = partials + chunk * columns;
    block.each(
        columns, weight_sum, [](std::int64_t) { return T(0); }, fsdp::Indices{});
    std::int64_t const end = rows < (chunk + 1) * rows_per_chunk ? rows : (chunk + 1) * rows_per_chunk;
    for (std::int64_t row = chunk * rows_per_chunk; row < end; ++row) {
      A const* const in = x + row * columns;
      A const* const up = dy + row * columns;
      T const s = scale[row];
      T const m = rms_projection(block, up, in, weight, s, columns);
      if (add != nullptr) {
        block.update(
            columns,
            [=](T& out, T& total, T g, T v, T w, T r) {
              T const normal = v * s;
              total += g * normal;
              out = r + s * (g * w - normal * m);
            },
            dx + row * columns, weight_sum, up, in, weight, add + row * columns);
      } else {
        block.update(
            columns,
            [=](T& out, T& total, T g, T v, T w) {
              T const normal = v * s;
              total += g * normal;
              out = s * (g * w - normal * m);
            },
            dx + row * columns, weight_sum, up, in, weight);
      }
    }
  }
};

/// One row: the gradient of the inputs alone.
struct RmsNormInputBackward {
  template <class Block, class A, class W>
  FSDP_HD void operator()(Block const& block, std::int64_t row, A const* dy, A const* x, W const* weight,
                          Compute<A> const* scale, A const* add, A* dx, std::int64_t columns) const {
    using T = Compute<A>;
    A const* const in = x + row * columns;
    A const* const up = dy + row * columns;
    T const s = scale[row];
    T const m = rms_projection(block, up, in, weight, s, columns);
    if (add != nullptr) {
      block.each(
          columns, dx + row * columns, [=](T g, T v, T w, T r) { return r + s * (g * w - v * s * m); }, up, in, weight,
          add + row * columns);
    } else {
      block.each(
          columns, dx + row * columns, [=](T g, T v, T w) { return s * (g * w - v * s * m); }, up, in, weight);
    }
  }
};

}  // namespace detail

/// y (rows, columns) = x * weight / sqrt(mean of x^2 + epsilon), rounded once.
/// @param scale  (rows): 1 / sqrt(mean of x^2 + epsilon), kept for backward; may be null
template <fsdp::Device D, class A, class W>
void rms_norm_forward(D const& device, typename D::Stream& stream, A const* x, W const* weight, A* y, Compute<A>* scale,
                      std::int64_t rows, std::int64_t columns, double epsilon) {
  if (rows == 0) return;
  device.launch(stream, rows, detail::RmsNormForward{}, x, weight, y, scale, columns, static_cast<Compute<A>>(epsilon));
}

/// sum (rows, columns) = residual + x, y = norm(sum): a residual addition and the RMSNorm behind it.
/// @param sum  may be residual or x
template <fsdp::Device D, class A, class W>
void residual_rms_norm_forward(D const& device, typename D::Stream& stream, A const* residual, A const* x, A* sum,
                               W const* weight, A* y, Compute<A>* scale, std::int64_t rows, std::int64_t columns,
                               double epsilon) {
  if (rows == 0) return;
  device.launch(stream, rows, detail::ResidualRmsNormForward{}, residual, x, sum, weight, y, scale, columns,
                static_cast<Compute<A>>(epsilon));
}

/// Elements of Compute<A> that rms_norm_backward needs as scratch for the weight's gradient.
constexpr std::int64_t rms_norm_partials(std::int64_t rows, std::int64_t columns) {
  return detail::row_chunks(rows) * columns;
}

/// dx (rows, columns) = gradient of x, plus `add`; weight_gradient (columns) +=.
/// @param add       (rows, columns), or null: the gradient that reaches x past the norm; may be dx or dy
/// @param weight_gradient  null: the weight is frozen, and partials are not used
/// @param partials  rms_norm_partials(rows, columns) elements of scratch
/// @param fresh     the weight's gradient is undefined: =, not +=
template <fsdp::Device D, class A, class W, class G>
void rms_norm_backward(D const& device, typename D::Stream& stream, A const* dy, A const* x, W const* weight,
                       Compute<A> const* scale, A const* add, A* dx, G* weight_gradient, std::int64_t rows,
                       std::int64_t columns, Compute<A>* partials, bool fresh = false) {
  if (rows == 0) return;
  if (weight_gradient == nullptr) {
    device.launch(stream, rows, detail::RmsNormInputBackward{}, dy, x, weight, scale, add, dx, columns);
    return;
  }
  auto const chunks = detail::row_chunks(rows);
  device.launch(stream, chunks, detail::RmsNormBackward{}, dy, x, weight, scale, add, dx, rows, columns, partials);
  detail::add_partials(device, stream, partials, chunks, columns, columns, weight_gradient, fresh);
}

}  // namespace transformer
