// SPDX-License-Identifier: Apache-2.0
// The matrix of the head: logits of normalised rows, and their cross-entropy.
#pragma once

#include <algorithm>
#include <cstdint>

#include "fsdp/layout.hpp"
#include "transformer/kernels/row_kernels.hpp"
#include "transformer/layers/pass.hpp"
#include "transformer/layers/shape.hpp"
#include "transformer/math/gemm.hpp"

namespace transformer {

/// [Note: Logits in parts]
/// The logits of all rows, (B T, V), never exist at once: ActivationPlan::logits_rows of them do. Training computes
/// them once, in backward, where the gradient slot of the matrix is at hand: a part's logits, their loss and gradient
/// in place, then at once both products of that gradient. Forward only normalises.
///
/// A pass through the head ends with the norm in training, a loss in evaluation, or logits in sampling.
struct Normalise {};

/// *loss += weight * mean cross-entropy of the pass. A negative target counts as a row without loss.
struct LossTarget {
  std::int32_t const* targets;  // (B n)
  double* loss;                 // device memory
  double weight = 1.0;
};

/// logits (V) of the pass's last row.
template <class T>
struct Sample {
  T* logits;
};

/// Scratch of the head. Blocks do not run at the same time: the logits may lie over their scratch.
template <class T>
struct HeadScratch {
  T* logits = nullptr;              // (logits rows, padded vocabulary)
  GemmScalar<T>* losses = nullptr;  // (B T)
};

/// Logits and loss of rows that the head has normalised. The model's head owns the matrix, this class its arithmetic.
template <class D, class T>
struct Classifier {
  using Stream = typename D::Stream;
  using Gradient = fsdp::Gradient<Compute<T>>;

  D device;
  Gemm<D>* gemm = nullptr;
  std::int64_t width = 1;        // C
  std::int64_t vocabulary = 1;   // V
  std::int64_t logits_rows = 1;  // that exist at a time
  HeadScratch<T> scratch{};

  std::int64_t padded() const { return padded_vocabulary(vocabulary); }

  /// *to.loss += to.weight * mean cross-entropy of the pass.
  /// @param normal  (B n, C)
  /// @param weight  (V, C)
  void evaluate(Stream& stream, Pass const& pass, T const* normal, T const* weight, LossTarget const& to) const;

  /// logits (V) of one row.
  void sample(Stream& stream, T const* normal, T const* weight, T* logits) const;

  /// *to.loss += to.weight * mean cross-entropy. Its gradients times gradient_scale are added to g, and replace
  /// normal (B n, C).
  void backward(Stream& stream, Pass const& pass, T* normal, T const* weight, fsdp::Tensor<Gradient, 2> const& g,
                LossTarget const& to, double gradient_scale) const;

 private:
  template <class Body>
  void each_part(Pass const& pass, Body&& body) const {
    std::int64_t const rows = pass.rows();
    for (std::int64_t first = 0; first < rows; first += logits_rows) body(first, std::min(logits_rows, rows - first));
  }
  void compute(Stream& stream, T const* normal, T const* weight, std::int64_t rows) const {
    linear(*gemm, stream, rows, width, vocabulary, normal, weight, scratch.logits, padded());
  }
  void add_loss(Stream& stream, Pass const& pass, double weight, double* loss) const {
    sum(device, stream, static_cast<Compute<T> const*>(scratch.losses), pass.rows(),
        weight / static_cast<double>(pass.rows()), loss, true);
  }
};

template <class D, class T>
void Classifier<D, T>::evaluate(Stream& stream, Pass const& pass, T const* normal, T const* weight,
                                LossTarget const& to) const {
  each_part(pass, [&](std::int64_t first, std::int64_t count) {
    compute(stream, normal + first * width, weight, count);
    cross_entropy_forward(device, stream, scratch.logits, to.targets + first, scratch.losses + first, count, vocabulary,
                          padded());
  });
  add_loss(stream, pass, to.weight, to.loss);
}

template <class D, class T>
void Classifier<D, T>::sample(Stream& stream, T const* normal, T const* weight, T* logits) const {
  linear(*gemm, stream, 1, width, vocabulary, normal, weight, logits, vocabulary);
}

template <class D, class T>
void Classifier<D, T>::backward(Stream& stream, Pass const& pass, T* normal, T const* weight,
                                fsdp::Tensor<Gradient, 2> const& g, LossTarget const& to, double gradient_scale) const {
  double const scale = to.weight * gradient_scale / static_cast<double>(pass.rows());
  each_part(pass, [&](std::int64_t first, std::int64_t count) {
    T* const rows = normal + first * width;
    T* const logits = scratch.logits;
    compute(stream, rows, weight, count);
    cross_entropy_backward(device, stream, logits, to.targets + first, scratch.losses + first, count, vocabulary,
                           padded(), scale);
    linear_weight_gradient(*gemm, stream, count, width, vocabulary, static_cast<T const*>(rows),
                           static_cast<T const*>(logits), padded(), g.data, g.fresh && first == 0);
    linear_input_gradient(*gemm, stream, count, width, vocabulary, static_cast<T const*>(logits), padded(), weight,
                          rows);
  });
  add_loss(stream, pass, to.weight, to.loss);
}

}  // namespace transformer
