// SPDX-License-Identifier: Apache-2.0
// Linear layers, with bias and adapter: forward, and backward.
#pragma once

#include <cstdint>

#include "fsdp/layout.hpp"
#include "transformer/kernels/row_kernels.hpp"
#include "transformer/layers/adapters.hpp"
#include "transformer/math/gemm.hpp"

namespace transformer {

/// The tensors of a linear layer, or their gradients. y (rows, out) = x (rows, in) W^T + bias, to which an adapter
/// adds.
template <class E>
struct Linear {
  fsdp::Tensor<E, 2> weight;  // (out, in)
  fsdp::Tensor<E, 1> bias;    // (out); without data in layers without bias
  Adapter<E> adapter;         // without data in layers without adapter

  /// Backward needs the layer's input, because a gradient of weight or adapter is wanted.
  bool wants_input() const { return weight.wanted() || adapter.a.wanted(); }
};

/// Linear layers of one pass: for its rows, on its stream. Every function only enqueues.
template <class D, class T>
struct LinearPass {
  using Stream = typename D::Stream;
  using Gradient = fsdp::Gradient<Compute<T>>;
  using Weights = Linear<T const>;
  using Gradients = Linear<Gradient>;

  D const& device;
  Stream& stream;
  Gemm<D>& gemm;
  Adapters<D, T> const& adapters;
  Compute<T>* partials;  // scratch of column sums
  std::int64_t rows;

  /// y (rows, out) = x (rows, in) W^T + bias, plus the adapter's part.
  void linear(Weights const& w, T const* x, T* y) const {
    auto const out = w.weight.extents[0], in = w.weight.extents[1];
    if (Gemm<D>::adds_bias && w.bias.data != nullptr) {
      if constexpr (Gemm<D>::adds_bias)
        gemm.run_with_bias(stream, Op::none, Op::transpose, rows, out, in, 1, x, in, w.weight.data, in, w.bias.data, y,
                           out);
    } else {
      transformer::linear(gemm, stream, rows, in, out, x, w.weight.data, y, out);
      add_bias(w, y);
    }
    adapters.forward(stream, rows, w.adapter, x, y, out);
  }
  /// y (rows, out) = x (rows, in) W^T, plus the adapter's part. The next kernel adds the bias.
  void linear_without_bias(Weights const& w, T const* x, T* y) const {
    auto const out = w.weight.extents[0], in = w.weight.extents[1];
    transformer::linear(gemm, stream, rows, in, out, x, w.weight.data, y, out);
    adapters.forward(stream, rows, w.adapter, x, y, out);
  }
  /// y (rows, out) += bias.
  void add_bias(Weights const& w, T* y) const { bias_add(device, stream, y, w.bias.data, rows, w.weight.extents[0]); }

  /// dx (rows, in) = dy (rows, out) W, plus the adapter's part.
  void linear_input_gradient(Weights const& w, T const* dy, T* dx) const {
    adapters.low_gradient(stream, rows, w.adapter, dy, w.weight.extents[0]);
    input_gradient(w, dy, dx);
  }
  /// g += dy^T x for the weight, column sums of dy for the bias, and the adapter's part; = where g is fresh.
  /// @pre linear_input_gradient() with the same dy, and no other layer's since
  void linear_parameter_gradients(Weights const& w, Gradients const& g, T const* x, T const* dy) const {
    auto const out = w.weight.extents[0], in = w.weight.extents[1];
    bias_backward(device, stream, dy, rows, out, g.bias.data, partials, g.bias.fresh);
    linear_weight_gradient(gemm, stream, rows, in, out, x, dy, out, g.weight.data, g.weight.fresh);
    adapters.weight_gradients(stream, rows, w.adapter, g.adapter, x, dy, out);
  }
  /// The whole backward. @param dx  may be x, but not dy
  void linear_backward(Weights const& w, Gradients const& g, T const* x, T const* dy, T* dx) const {
    adapters.low_gradient(stream, rows, w.adapter, dy, w.weight.extents[0]);
    linear_parameter_gradients(w, g, x, dy);
    input_gradient(w, dy, dx);
  }

  /// dx (rows, in) = dy (rows, out) W, plus the adapter's part. @pre adapters.low_gradient() of this layer and dy
  void input_gradient(Weights const& w, T const* dy, T* dx) const {
    auto const out = w.weight.extents[0], in = w.weight.extents[1];
    transformer::linear_input_gradient(gemm, stream, rows, in, out, dy, out, w.weight.data, dx);
    adapters.input_gradient(stream, rows, w.adapter, dx);
  }
};

}  // namespace transformer
