// SPDX-License-Identifier: Apache-2.0
// Orthogonalises matrices by Newton-Schulz iterations.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "fsdp/concepts.hpp"
#include "fsdp/kernels/muon.hpp"
#include "fsdp/kernels/norms.hpp"
#include "fsdp/layout.hpp"
#include "fsdp/memory.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// Matrix products for Newton-Schulz iterations, by a kernel of the library. Give Muon a type with this interface to
/// use cuBLAS or OpenBLAS: on every rank, and for any address, a product must have the same bits.
struct BlockProducts {
  /// Enqueues C = alpha A B + beta C: see kernels::product.
  template <class D>
  void operator()(D const& device, typename D::Stream& stream, std::int64_t m, std::int64_t n, std::int64_t k,
                  float alpha, float const* a, float const* b, float beta, float* c) const {
    kernels::product(device, stream, m, n, k, alpha, a, b, beta, c);
  }
};

namespace detail {

/// The quintic Newton-Schulz iteration of Muon: X = a X + (b A + c A A) X with A = X X^T, a few times, from X with a
/// Frobenius norm of 1. It brings the singular values of X near 1.
template <Device D, class Products>
class Orthogonaliser {
 public:
  Orthogonaliser(Products products, int iterations, float eps)
      : products_(std::move(products)), iterations_(iterations), eps_(eps) {}

  /// Takes memory: for matrices of up to `elements`, of which one side is at most `rows`, 2 (elements + rows^2) floats.
  [[gnu::cold]] void allocate(D const& device, MemoryAccount& account, std::int64_t elements, std::int64_t rows) {
    auto const aligned = [](std::int64_t count) { return align_up(count, layout_alignment); };
    auto const floats = 2 * aligned(elements) + 2 * aligned(rows * rows);
    auto const doubles = aligned(kernels::norm_partial_count(elements) + 1);
    memory_ = {device, account, MemoryTag::workspace,
               static_cast<std::size_t>(floats) * sizeof(float) + static_cast<std::size_t>(doubles) * sizeof(double)};
    x_ = memory_.template as<float>();
    y_ = x_ + aligned(elements);
    gram_ = y_ + aligned(elements);
    polynomial_ = gram_ + aligned(rows * rows);
    squares_ = reinterpret_cast<double*>(polynomial_ + aligned(rows * rows));
  }

  /// to = scale * the orthogonalised `from`, both dense (rows, columns). Works on the transpose if there are more rows
  /// than columns.
  /// @note Stream: everything is enqueued on `stream`, always the same
  void operator()(D const& device, typename D::Stream& stream, std::int64_t rows, std::int64_t columns,
                  float const* from, float* to, float scale) {
    constexpr float a = 3.4445f, b = -4.7750f, c = 2.0315f;
    auto const elements = rows * columns;
    auto const r = std::min(rows, columns), n = std::max(rows, columns);
    auto const square = static_cast<std::size_t>(r * r) * sizeof(float);
    auto const whole = static_cast<std::size_t>(elements) * sizeof(float);
    auto *x = x_, *y = y_;
    auto* const partials = squares_ + 1;
    kernels::norm_partials(device, stream, from, elements, NormKind::l2, partials);
    kernels::norm_combine(device, stream, static_cast<double const*>(partials), kernels::norm_partial_count(elements),
                          NormKind::l2, squares_);
    if (rows > columns)
      kernels::transpose(device, stream, rows, columns, from, x);
    else
      device.copy_async(stream, x, from, whole);
    kernels::normalise(device, stream, x, elements, static_cast<double const*>(squares_), eps_);
    auto const multiply = [&](std::int64_t width, std::int64_t terms, float alpha, float const* left,
                              float const* right, float beta, float* sum) {
      products_(device, stream, r, width, terms, alpha, left, right, beta, sum);
    };
    for (int i = 0; i < iterations_; ++i) {
      kernels::transpose(device, stream, r, n, static_cast<float const*>(x), y);
      multiply(r, n, 1.0f, x, y, 0.0f, gram_);
      device.copy_async(stream, polynomial_, gram_, square);
      multiply(r, r, c, gram_, gram_, b, polynomial_);
      device.copy_async(stream, y, x, whole);
      multiply(n, r, 1.0f, polynomial_, x, a, y);
      std::swap(x, y);
    }
    if (rows > columns)
      kernels::transpose(device, stream, r, n, static_cast<float const*>(x), to);
    else
      device.copy_async(stream, to, x, whole);
    if (scale != 1.0f) kernels::scale(device, stream, to, elements, scale);
  }

 private:
  Products products_;
  int iterations_;
  float eps_;
  AccountedMemory<D const> memory_;
  float *x_ = nullptr, *y_ = nullptr;              ///< a matrix each
  float *gram_ = nullptr, *polynomial_ = nullptr;  ///< (rows, rows) each
  double* squares_ = nullptr;                      ///< of a Frobenius norm; its partial sums follow
};

}  // namespace detail
}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
