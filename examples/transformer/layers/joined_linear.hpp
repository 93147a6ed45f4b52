// SPDX-License-Identifier: Apache-2.0
// Linear layers that read the same rows, with their results side by side: queries, keys and values, or gate and up.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "fsdp/layout.hpp"
#include "transformer/layers/adapters.hpp"
#include "transformer/layers/linear.hpp"
#include "transformer/math/gemm.hpp"

namespace transformer {

/// [Note: Joined linear layers]
/// Checkpoints have a matrix for each of queries, keys and values. In a flat parameter they lie side by side if each
/// has a multiple of fsdp::layout_alignment elements: then they are one matrix, and every pass is one product.
/// Otherwise each matrix has a product of its own.
template <class E, std::size_t N>
struct JoinedLinear {
  std::array<fsdp::Tensor<E, 2>, N> weights;  // (out, in) each
  std::array<Adapter<E>, N> adapters;         // without data in layers without adapters

  /// Outputs of all layers.
  std::int64_t outputs() const {
    std::int64_t sum = 0;
    for (auto const& weight : weights) sum += weight.extents[0];
    return sum;
  }
  /// The matrices are one.
  bool side_by_side() const {
    for (std::size_t i = 0; i + 1 < N; ++i)
      if (weights[i].data + weights[i].numel() != weights[i + 1].data) return false;
    return true;
  }
  /// Backward needs the layers' input, because a gradient of a weight or an adapter is wanted.
  bool wants_input() const {
    bool any = false;
    for (std::size_t i = 0; i < N; ++i) any = any || weights[i].wanted() || adapters[i].a.wanted();
    return any;
  }
};

/// y (rows, all outputs) = x (rows, in) times each W^T, plus the adapters' parts.
template <class D, class T, std::size_t N>
void joined_linear(LinearPass<D, T> const& pass, JoinedLinear<T const, N> const& w, T const* x, T* y) {
  auto const in = w.weights[0].extents[1], all = w.outputs();
  if (w.side_by_side()) {
    linear(pass.gemm, pass.stream, pass.rows, in, all, x, w.weights[0].data, y, all);
  } else {
    for (T* part = y; auto const& weight : w.weights) {
      linear(pass.gemm, pass.stream, pass.rows, in, weight.extents[0], x, weight.data, part, all);
      part += weight.extents[0];
    }
  }
  for (std::size_t i = 0; i < N; ++i) {
    pass.adapters.forward(pass.stream, pass.rows, w.adapters[i], x, y, all);
    y += w.weights[i].extents[0];
  }
}

/// Each dW (out, in) += its dy^T x, or = where it is fresh. Gradients without data are left out.
template <class D, class T, std::size_t N>
void joined_weight_gradients(LinearPass<D, T> const& pass, JoinedLinear<fsdp::Gradient<Compute<T>>, N> const& g,
                             T const* x, T const* dy) {
  auto const& weights = g.weights;
  auto const in = weights[0].extents[1], all = g.outputs();
  bool together = weights[0].wanted() && g.side_by_side();
  for (auto const& weight : weights) together = together && weight.fresh == weights[0].fresh;
  if (together)
    return linear_weight_gradient(pass.gemm, pass.stream, pass.rows, in, all, x, dy, all, weights[0].data,
                                  weights[0].fresh);
  for (auto const& weight : weights) {
    linear_weight_gradient(pass.gemm, pass.stream, pass.rows, in, weight.extents[0], x, dy, all, weight.data,
                           weight.fresh);
    dy += weight.extents[0];
  }
}

/// The whole backward: adds to g the gradients of the weights and adapters; dx (rows, in) = dy (rows, all outputs)
/// times all W, plus the adapters' parts.
/// @pre dx is neither x nor dy
template <class D, class T, std::size_t N>
void joined_linear_backward(LinearPass<D, T> const& pass, JoinedLinear<T const, N> const& w,
                            JoinedLinear<fsdp::Gradient<Compute<T>>, N> const& g, T const* x, T const* dy, T* dx) {
  auto const& adapters = pass.adapters;
  auto& stream = pass.stream;
  auto& gemm = pass.gemm;
  auto const rows = pass.rows;
  auto const in = w.weights[0].extents[1], all = w.outputs();
  joined_weight_gradients(pass, g, x, dy);
  if (w.side_by_side()) {
    linear_input_gradient(gemm, stream, rows, in, all, dy, all, w.weights[0].data, dx);
  } else {
    for (T const* part = dy; auto const& weight : w.weights) {
      auto const out = weight.extents[0];
      gemm.run(stream, Op::none, Op::none, rows, in, out, 1, part, all, weight.data, in, part == dy ? 0 : 1, dx, in);
      part += out;
    }
  }
  for (std::size_t i = 0; i < N; ++i) {
    adapters.low_gradient(stream, rows, w.adapters[i], dy, all);
    adapters.weight_gradients(stream, rows, w.adapters[i], g.adapters[i], x, dy, all);
    adapters.input_gradient(stream, rows, w.adapters[i], dx);
    dy += w.weights[i].extents[0];
  }
}

}  // namespace transformer
