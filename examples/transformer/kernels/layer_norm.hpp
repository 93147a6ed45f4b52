// SPDX-License-Identifier: Apache-2.0
// LayerNorm over rows (Ba, Kiros, Hinton, arXiv:1607.06450), forward and backward.
#pragma once

#include <cstdint>
#include <type_traits>

#include "transformer/kernels/activation.hpp"
#include "transformer/kernels/column_sums.hpp"
#include "transformer/kernels/common.hpp"
#include "transformer/kernels/layer_norm_blocks.hpp"

namespace transformer {

namespace detail {

struct LayerNormForward {
  static constexpr int blocks_per_multiprocessor = 4;  // left alone, ptxas takes 32 registers and spills
  template <class Block, class A, class W>
  FSDP_HD void operator()(Block const& block, std::int64_t row, A const* x, W const* weight, W const* bias, A* y,
                          Compute<A>* mean, Compute<A>* scale, std::int64_t columns, Compute<A> epsilon) const {
    using T = Compute<A>;
    A const* const in = x + row * columns;
    T const count = static_cast<T>(columns);
    T const m = block.sum(
                    columns, [](T v) { return v; }, in) /
                count;
    T const variance = block.sum(
                           columns, [=](T v) { return (v - m) * (v - m); }, in) /
                       count;
    T const s = T(1) / fsdp::math::sqrt(variance + epsilon);
    if (block.thread() == 0 && mean != nullptr) {
      mean[row] = m;
      scale[row] = s;
    }
    A* const out = y + row * columns;
    if (bias != nullptr) {
      block.each(
          columns, out, [=](T v, T w, T b) { return (v - m) * s * w + b; }, in, weight, bias);
    } else {
      block.each(
          columns, out, [=](T v, T w) { return (v - m) * s * w; }, in, weight);
    }
  }
};

/// One chunk of rows: gradients of the inputs, and partial sums (2, columns) for weight and bias.
struct LayerNormBackward {
  static constexpr int blocks_per_multiprocessor = 4;
  template <class Block, class A, class W>
  FSDP_HD void operator()(Block const& block, std::int64_t chunk, A const* dy, A const* x, W const* weight,
                          Compute<A> const* mean, Compute<A> const* scale, A const* add, A* dx, std::int64_t rows,
                          std::int64_t columns, Compute<A>* partials) const {
    using T = Compute<A>;
    T* const weight_sum = partials + chunk * 2 * columns;
    T* const bias_sum = weight_sum + columns;
    block.each(
        2 * columns, weight_sum, [](std::int64_t) { return T(0); }, fsdp::Indices{});
    T const count = static_cast<T>(columns);
    std::int64_t const end = rows < (chunk + 1) * rows_per_chunk ? rows : (chunk + 1) * rows_per_chunk;
    for (std::int64_t row = chunk * rows_per_chunk; row < end; ++row) {
      T const m = mean[row];
      T const s = scale[row];
      A const* const in = x + row * columns;
      A const* const up = dy + row * columns;
      auto const sums = block.sum_pair(
          columns,
          [=](T g, T v, T w) {
            T const product = g * w;
            return fsdp::Pair<T>{product, product * ((v - m) * s)};
          },
          up, in, weight);
      T const a = sums.first / count;
      T const b = sums.second / count;
      if (add != nullptr) {
        block.update(
            columns,
            [=](T& out, T& weight_total, T& bias_total, T g, T v, T w, T r) {
              T const normal = (v - m) * s;
              weight_total += g * normal;
              bias_total += g;
              out = r + s * (g * w - a - normal * b);
            },
            dx + row * columns, weight_sum, bias_sum, up, in, weight, add + row * columns);
      } else {
        block.update(
            columns,
            [=](T& out, T& weight_total, T& bias_total, T g, T v, T w) {
              T const normal = (v - m) * s;
              weight_total += g * normal;
              bias_total += g;
              out = s * (g * w - a - normal * b);
            },
            dx + row * columns, weight_sum, bias_sum, up, in, weight);
      }
    }
  }
};

}  // namespace detail

/// y (rows, columns) = normalised x * weight + bias.
/// @param bias   (columns), or null
/// @param mean, scale  (rows): mean and 1 / standard deviation, kept for backward; both may be null
template <fsdp::Device D, class A, class W>
void layer_norm_forward(D const& device, typename D::Stream& stream, A const* x, W const* weight, W const* bias, A* y,
                        Compute<A>* mean, Compute<A>* scale, std::int64_t rows, std::int64_t columns,
                        double epsilon = 1e-5) {
  if (rows == 0) return;
  if constexpr (fsdp::RunsThreadBlocks<D> && std::is_same_v<A, W>) {
    blocks::LayerNormArgs<A> const args{x, nullptr, nullptr, nullptr, weight,  bias,
                                        y, mean,    scale,   rows,    columns, static_cast<Compute<A>>(epsilon)};
    if (blocks::layer_norm_rows(device, stream, args)) return;
  }
  device.launch(stream, rows, detail::LayerNormForward{}, x, weight, bias, y, mean, scale, columns,
                static_cast<Compute<A>>(epsilon));
}

/// sum (rows, columns) = residual + x + bias, y = norm(sum): a residual addition and the LayerNorm behind it.
/// @param bias  (columns) of x, or null
template <fsdp::Device D, class A, class W>
void residual_layer_norm_forward(D const& device, typename D::Stream& stream, A const* residual, A const* x,
                                 W const* bias, A* sum, W const* weight, W const* norm_bias, A* y, Compute<A>* mean,
                                 Compute<A>* scale, std::int64_t rows, std::int64_t columns, double epsilon = 1e-5) {
  if (rows == 0) return;
  if constexpr (fsdp::RunsThreadBlocks<D> && std::is_same_v<A, W>) {
    blocks::LayerNormArgs<A> const args{x, residual, bias,  sum,  weight,  norm_bias,
                                        y, mean,     scale, rows, columns, static_cast<Compute<A>>(epsilon)};
    if (blocks::layer_norm_rows(device, stream, args)) return;
  }
  bias_residual_forward(device, stream, residual, x, bias, sum, rows, columns);
  layer_norm_forward(device, stream, static_cast<A const*>(sum), weight, norm_bias, y, mean, scale, rows, columns,
                     epsilon);
}

/// Elements of Compute<A> that layer_norm_backward needs as scratch.
constexpr std::int64_t layer_norm_partials(std::int64_t rows, std::int64_t columns) {
  return detail::row_chunks(rows) * 2 * columns;
}

/// dx (rows, columns) = gradient of x, plus `add`; weight_gradient += , bias_gradient += .
/// @param add       (rows, columns), or null: the gradient that reaches x past the LayerNorm; may be dx or dy
/// @param bias_gradient  (columns), or null
/// @param partials  layer_norm_partials(rows, columns) elements of scratch
/// @param fresh     both gradients are undefined: =, not +=
template <fsdp::Device D, class A, class W, class G>
void layer_norm_backward(D const& device, typename D::Stream& stream, A const* dy, A const* x, W const* weight,
                         Compute<A> const* mean, Compute<A> const* scale, A const* add, A* dx, G* weight_gradient,
                         G* bias_gradient, std::int64_t rows, std::int64_t columns, Compute<A>* partials,
                         bool fresh = false) {
  if (rows == 0) return;
  auto const chunks = detail::row_chunks(rows);
  bool done = false;
  if constexpr (fsdp::RunsThreadBlocks<D> && std::is_same_v<A, W>)
    done =
        blocks::layer_norm_rows_backward(device, stream, dy, x, weight, mean, scale, add, dx, rows, columns, partials);
  if (!done) {
    device.launch(stream, chunks, detail::LayerNormBackward{}, dy, x, weight, mean, scale, add, dx, rows, columns,
                  partials);
  }
  if (weight_gradient != nullptr) {
    detail::add_partials(device, stream, partials, chunks, 2 * columns, columns, weight_gradient, fresh);
  }
  if (bias_gradient != nullptr) {
    detail::add_partials(device, stream, partials + columns, chunks, 2 * columns, columns, bias_gradient, fresh);
  }
}

}  // namespace transformer
