// SPDX-License-Identifier: Apache-2.0
// Linear layers that read the same rows, with their results side by side: queries, keys and values, or gate and up.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "fsdp/layout.hpp"
#include "transformer/math/gemm.hpp"

namespace transformer {

/// [Note: Joined linear layers]
/// Checkpoints have a matrix for each of queries, keys and values. In a flat parameter they lie side by side if each
/// has a multiple of fsdp::layout_alignment elements: then they are one matrix, and every pass is one product.
/// Otherwise each matrix has a product of its own.
template <class E, std::size_t N>
using JoinedMatrices = std::array<fsdp::Tensor<E, 2>, N>;

/// The matrices are one.
template <class E, std::size_t N>
bool side_by_side(JoinedMatrices<E, N> const& matrices) {
  for (std::size_t i = 0; i + 1 < N; ++i)
    if (matrices[i].data + matrices[i].numel() != matrices[i + 1].data) return false;
  return true;
}
/// Outputs of all layers.
template <class E, std::size_t N>
std::int64_t joined_outputs(JoinedMatrices<E, N> const& matrices) {
  std::int64_t sum = 0;
  for (auto const& matrix : matrices) sum += matrix.extents[0];
  return sum;
}

/// y (rows, all outputs) = x (rows, in) times each W^T.
template <class D, class T, std::size_t N>
void joined_linear(Gemm<D>& gemm, typename D::Stream& stream, std::int64_t rows, T const* x,
                   JoinedMatrices<T const, N> const& w, T* y) {
  auto const in = w[0].extents[1], all = joined_outputs(w);
  if (side_by_side(w)) return linear(gemm, stream, rows, in, all, x, w[0].data, y, all);
  for (auto const& matrix : w) {
    linear(gemm, stream, rows, in, matrix.extents[0], x, matrix.data, y, all);
    y += matrix.extents[0];
  }
}

/// dx (rows, in) = dy (rows, all outputs) times all W.
template <class D, class T, std::size_t N>
void joined_input_gradient(Gemm<D>& gemm, typename D::Stream& stream, std::int64_t rows, T const* dy,
                           JoinedMatrices<T const, N> const& w, T* dx) {
  auto const in = w[0].extents[1], all = joined_outputs(w);
  if (side_by_side(w)) return linear_input_gradient(gemm, stream, rows, in, all, dy, all, w[0].data, dx);
  for (std::size_t i = 0; i < N; ++i) {
    auto const out = w[i].extents[0];
    gemm.run(stream, Op::none, Op::none, rows, in, out, 1, dy, all, w[i].data, in, i == 0 ? 0 : 1, dx, in);
    dy += out;
  }
}

/// Each dW (out, in) += its dy^T x. Gradients without data are left out.
template <class D, class T, class G, std::size_t N>
void joined_weight_gradient(Gemm<D>& gemm, typename D::Stream& stream, std::int64_t rows, T const* x, T const* dy,
                            JoinedMatrices<G, N> const& gradients) {
  auto const in = gradients[0].extents[1], all = joined_outputs(gradients);
  bool together = gradients[0].wanted() && side_by_side(gradients);
  for (auto const& gradient : gradients) together = together && gradient.fresh == gradients[0].fresh;
  if (together)
    return linear_weight_gradient(gemm, stream, rows, in, all, x, dy, all, gradients[0].data, gradients[0].fresh);
  for (auto const& gradient : gradients) {
    linear_weight_gradient(gemm, stream, rows, in, gradient.extents[0], x, dy, all, gradient.data, gradient.fresh);
    dy += gradient.extents[0];
  }
}

}  // namespace transformer
