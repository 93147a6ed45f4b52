// SPDX-License-Identifier: Apache-2.0
// The last RMSNorm and the classifier.
#pragma once

#include <cstdint>

#include "context.hpp"
#include "fsdp/layout.hpp"
#include "transformer/kernels/rms_norm.hpp"
#include "transformer/layers/classifier.hpp"
#include "transformer/layers/pass.hpp"

namespace llama {

/// RMSNorm and logits. In a tied model its matrix is the embedding's: both modules share a unit.
template <class D, class T>
class Head {
 public:
  using Stream = typename D::Stream;
  using Real = Compute<T>;
  using Gradient = fsdp::Gradient<Real>;
  static constexpr bool sets_gradients = true, skips_gradients = true;

  template <class E>
  struct Params {
    fsdp::Tensor<E, 1> norm;    // (C)
    fsdp::Tensor<E, 2> matrix;  // (V, C)
  };

  explicit Head(Context<D, T> const& context) : context_(&context) {}

  template <class E, class Visit>
  void describe(Params<E>& p, Visit&& tensor) const {
    auto const& config = context_->config;
    auto const& tuning = context_->tuning;
    bool const tied = config.tie_word_embeddings;
    tensor("model.norm.weight", p.norm, {config.hidden_size},
           fsdp::TensorOptions{.decay = false, .init = fsdp::init::ones, .frozen = tuning.adapts()});
    tensor(tied ? "model.embed_tokens.weight" : "lm_head.weight", p.matrix, {config.vocab_size, config.hidden_size},
           fsdp::TensorOptions{.frozen = !tuning.trains_head(tied)});
  }

  /// Normalises rows (B n, C) into the workspace's narrow, where backward finds them.
  /// @param scale  (B n): the norm's statistic
  void forward(Stream& stream, Params<T const> const& w, Pass const& pass, T const* rows, Real* scale, Normalise) const;

  void forward(Stream& stream, Params<T const> const& w, Pass const& pass, T const* rows, Real* scale,
               Evaluate const& to) const;

  void forward(Stream& stream, Params<T const> const& w, Pass const& pass, T const* rows, Real* scale,
               Sample<T> const& to) const;

  /// *loss += loss_weight * mean cross-entropy; g += its gradients times gradient_scale;
  /// gradient (B n, C) = that of `rows`, times gradient_scale.
  /// @pre forward(..., Normalise) of the same pass, and nothing since that uses the workspace
  void backward(Stream& stream, Params<T const> const& w, Params<Gradient> const& g, Pass const& pass, T const* rows,
                Real const* scale, Evaluate const& to, double loss_weight, double gradient_scale, T* gradient) const;

 private:
  void normalise(Stream& stream, Params<T const> const& w, T const* rows, Real* scale, std::int64_t count) const {
    rms_norm_forward(context_->device, stream, rows, w.norm.data, context_->workspace.narrow, scale, count,
                     context_->config.hidden_size, context_->config.rms_norm_eps);
  }

  Context<D, T> const* context_;
};

template <class D, class T>
void Head<D, T>::forward(Stream& stream, Params<T const> const& w, Pass const& pass, T const* rows, Real* scale,
                         Normalise) const {
  normalise(stream, w, rows, scale, pass.rows());
}

template <class D, class T>
void Head<D, T>::forward(Stream& stream, Params<T const> const& w, Pass const& pass, T const* rows, Real* scale,
                         Evaluate const& to) const {
  normalise(stream, w, rows, scale, pass.rows());
  context_->classifier.evaluate(stream, pass, context_->workspace.narrow, w.matrix.data, to);
}

template <class D, class T>
void Head<D, T>::forward(Stream& stream, Params<T const> const& w, Pass const& pass, T const* rows, Real*,
                         Sample<T> const& to) const {
  normalise(stream, w, rows + (pass.rows() - 1) * context_->config.hidden_size, nullptr, 1);
  context_->classifier.sample(stream, context_->workspace.narrow, w.matrix.data, to.logits);
}

template <class D, class T>
void Head<D, T>::backward(Stream& stream, Params<T const> const& w, Params<Gradient> const& g, Pass const& pass,
                          T const* rows, Real const* scale, Evaluate const& to, double loss_weight,
                          double gradient_scale, T* gradient) const {
  auto const& work = context_->workspace;
  context_->classifier.backward(stream, pass, work.narrow, w.matrix.data, g.matrix, to, loss_weight, gradient_scale);
  rms_norm_backward(context_->device, stream, static_cast<T const*>(work.narrow), rows, w.norm.data, scale,
                    static_cast<T const*>(nullptr), gradient, g.norm.data, pass.rows(), context_->config.hidden_size,
                    work.partials, g.norm.fresh);
}

}  // namespace llama
