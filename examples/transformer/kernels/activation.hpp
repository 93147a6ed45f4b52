// SPDX-License-Identifier: Apache-2.0
// GELU by either formula, biases and residual additions, and a sum.
#pragma once

#include <cstdint>

#include "transformer/kernels/common.hpp"
#include "transformer/kernels/gelu.hpp"

namespace transformer {

namespace detail {

template <class Formula>
struct Gelu {
  template <class Block, class A>
  FSDP_HD void operator()(Block const& block, std::int64_t index, A const* x, A* y, std::int64_t n) const {
    std::int64_t const begin = index * chunk_elements;
    block.each(
        chunk_length(n, index), y + begin, [](Compute<A> v) { return Formula::value(v); }, x + begin);
  }
};

template <class Formula>
struct GeluBackward {
  template <class Block, class A>
  FSDP_HD void operator()(Block const& block, std::int64_t index, A* x, A* gradient, std::int64_t n) const {
    using T = Compute<A>;
    std::int64_t const begin = index * chunk_elements;
    block.update(
        chunk_length(n, index),
        [](T& v, T& g) {
          auto const [value, derivative] = Formula::with_derivative(v);
          v = value;
          g *= derivative;
        },
        x + begin, gradient + begin);
  }
};

struct Add {
  template <class Block, class A>
  FSDP_HD void operator()(Block const& block, std::int64_t index, A const* a, A const* b, A* out,
                          std::int64_t n) const {
    using T = Compute<A>;
    std::int64_t const begin = index * chunk_elements;
    block.each(
        chunk_length(n, index), out + begin, [](T left, T right) { return left + right; }, a + begin, b + begin);
  }
};

struct BiasAdd {
  template <class Block, class A, class W>
  FSDP_HD void operator()(Block const& block, std::int64_t row, A* x, W const* bias, std::int64_t columns) const {
    using T = Compute<A>;
    block.update(
        columns, [](T& v, Compute<W> b) { v += static_cast<T>(b); }, x + row * columns, bias);
  }
};

template <class Formula>
struct BiasGelu {
  template <class Block, class A, class W>
  FSDP_HD void operator()(Block const& block, std::int64_t row, A* x, W const* bias, A* y, std::int64_t columns) const {
    using T = Compute<A>;
    block.update(
        columns,
        [](T& v, T& out, Compute<W> b) {
          v += static_cast<T>(b);
          out = Formula::value(v);
        },
        x + row * columns, y + row * columns, bias);
  }
};

struct BiasResidual {
  template <class Block, class A, class W>
  FSDP_HD void operator()(Block const& block, std::int64_t row, A const* residual, A const* x, W const* bias, A* out,
                          std::int64_t columns) const {
    using T = Compute<A>;
    block.each(
        columns, out + row * columns, [](T r, T v, Compute<W> b) { return r + (v + static_cast<T>(b)); },
        residual + row * columns, x + row * columns, bias);
  }
};

struct Sum {
  template <class Block, class T>
  FSDP_HD void operator()(Block const& block, std::int64_t, T const* x, std::int64_t n, double scale, double* out,
                          bool add) const {
    double const sum = scale * block.sum(
                                   n, [](T v) { return static_cast<double>(v); }, x);
    if (block.thread() == 0) *out = add ? *out + sum : sum;
  }
};

}  // namespace detail

/// y = gelu(x), n elements.
/// @tparam Formula  ExactGelu or TanhGelu, here and below
template <class Formula = ExactGelu, fsdp::Device D, class A>
void gelu_forward(D const& device, typename D::Stream& stream, A const* x, A* y, std::int64_t n) {
  if (n > 0) device.launch(stream, detail::blocks_for(n), detail::Gelu<Formula>{}, x, y, n);
}

/// gradient *= gelu'(x), x = gelu(x), n elements: backward of what follows GELU wants its result, which is not kept.
/// @pre gradient is not x
template <class Formula = ExactGelu, fsdp::Device D, class A>
void gelu_backward(D const& device, typename D::Stream& stream, A* x, A* gradient, std::int64_t n) {
  if (n > 0) device.launch(stream, detail::blocks_for(n), detail::GeluBackward<Formula>{}, x, gradient, n);
}

/// out = a + b, n elements.
template <fsdp::Device D, class A>
void add(D const& device, typename D::Stream& stream, A const* a, A const* b, A* out, std::int64_t n) {
  if (n > 0) device.launch(stream, detail::blocks_for(n), detail::Add{}, a, b, out, n);
}

/// x (rows, columns) += bias (columns). Null adds nothing.
template <fsdp::Device D, class A, class W>
void bias_add(D const& device, typename D::Stream& stream, A* x, W const* bias, std::int64_t rows,
              std::int64_t columns) {
  if (bias != nullptr) device.launch(stream, rows, detail::BiasAdd{}, x, bias, columns);
}

/// x (rows, columns) += bias (columns), y = gelu(x): x is kept for backward. A null bias adds nothing.
/// @pre y is not x
template <class Formula = ExactGelu, fsdp::Device D, class A, class W>
void bias_gelu_forward(D const& device, typename D::Stream& stream, A* x, W const* bias, A* y, std::int64_t rows,
                       std::int64_t columns) {
  if (bias == nullptr) return gelu_forward<Formula>(device, stream, static_cast<A const*>(x), y, rows * columns);
  device.launch(stream, rows, detail::BiasGelu<Formula>{}, x, bias, y, columns);
}

/// out (rows, columns) = residual + x + bias (columns). A null bias adds nothing.
template <fsdp::Device D, class A, class W>
void bias_residual_forward(D const& device, typename D::Stream& stream, A const* residual, A const* x, W const* bias,
                           A* out, std::int64_t rows, std::int64_t columns) {
  if (bias == nullptr) return add(device, stream, residual, x, out, rows * columns);
  device.launch(stream, rows, detail::BiasResidual{}, residual, x, bias, out, columns);
}

/// *out = scale * sum of x (n), or *out += it; summed in double.
template <fsdp::Device D, class T>
void sum(D const& device, typename D::Stream& stream, T const* x, std::int64_t n, double scale, double* out, bool add) {
  device.launch(stream, 1, detail::Sum{}, x, n, scale, out, add);
}

}  // namespace transformer
