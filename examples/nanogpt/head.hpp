// SPDX-License-Identifier: Apache-2.0
// The last LayerNorm and the classifier, which is the token embedding's matrix.
#pragma once

#include <cstdint>

#include "context.hpp"
#include "fsdp/layout.hpp"
#include "transformer/kernels/row_kernels.hpp"
#include "transformer/layers/classifier.hpp"
#include "transformer/layers/pass.hpp"

namespace nanogpt {

/// LayerNorm and logits. Its wte is the embedding's: both modules share a unit.
template <class D, class T>
class Head {
 public:
  using Stream = typename D::Stream;
  using Gradient = fsdp::Gradient<Compute<T>>;
  static constexpr bool sets_gradients = true, skips_gradients = true;

  template <class E>
  struct Params {
    fsdp::Tensor<E, 1> norm_weight, norm_bias;  // (C)
    fsdp::Tensor<E, 2> tokens;                  // (V, C)
  };

  explicit Head(Context<D, T> const& context) : context_(&context) {}

  template <class E, class Visit>
  void describe(Params<E>& p, Visit&& tensor) const {
    auto const& config = context_->config;
    auto const& tuning = context_->tuning;
    fsdp::TensorOptions const ones{.decay = false, .init = fsdp::init::ones, .frozen = tuning.adapts()};
    fsdp::TensorOptions const zeros{.decay = false, .init = fsdp::init::zeros, .frozen = tuning.adapts()};
    tensor("ln_f.weight", p.norm_weight, {config.n_embd}, ones);
    if (config.bias) tensor("ln_f.bias", p.norm_bias, {config.n_embd}, zeros);
    tensor("wte.weight", p.tokens, {config.vocab_size, config.n_embd},
           fsdp::TensorOptions{.frozen = !tuning.trains_head(true)});
  }

  /// Normalises rows (B n, C) into the workspace's narrow, where backward finds them.
  void forward(Stream& stream, Params<T const> const& w, Pass const& pass, T const* rows,
               NormStatistics<Compute<T>> const& norm, Normalise) const;

  void forward(Stream& stream, Params<T const> const& w, Pass const& pass, T const* rows,
               NormStatistics<Compute<T>> const& norm, Evaluate const& to) const;

  void forward(Stream& stream, Params<T const> const& w, Pass const& pass, T const* rows,
               NormStatistics<Compute<T>> const&, Sample<T> const& to) const;

  /// *loss += loss_weight * mean cross-entropy; g += its gradients times gradient_scale;
  /// gradient (B n, C) = that of `rows`, times gradient_scale.
  /// @pre forward(..., Normalise) of the same pass, and nothing since that uses the workspace
  void backward(Stream& stream, Params<T const> const& w, Params<Gradient> const& g, Pass const& pass, T const* rows,
                NormStatistics<Compute<T>> const& norm, Evaluate const& to, double loss_weight, double gradient_scale,
                T* gradient) const;

 private:
  Context<D, T> const* context_;
};

template <class D, class T>
void Head<D, T>::forward(Stream& stream, Params<T const> const& w, Pass const& pass, T const* rows,
                         NormStatistics<Compute<T>> const& norm, Normalise) const {
  layer_norm_forward(context_->device, stream, rows, w.norm_weight.data, w.norm_bias.data, context_->workspace.narrow,
                     norm.mean, norm.scale, pass.rows(), context_->config.n_embd);
}

template <class D, class T>
void Head<D, T>::forward(Stream& stream, Params<T const> const& w, Pass const& pass, T const* rows,
                         NormStatistics<Compute<T>> const& norm, Evaluate const& to) const {
  forward(stream, w, pass, rows, norm, Normalise{});
  context_->classifier.evaluate(stream, pass, context_->workspace.narrow, w.tokens.data, to);
}

template <class D, class T>
void Head<D, T>::forward(Stream& stream, Params<T const> const& w, Pass const& pass, T const* rows,
                         NormStatistics<Compute<T>> const&, Sample<T> const& to) const {
  auto const width = context_->config.n_embd;
  T* const narrow = context_->workspace.narrow;
  layer_norm_forward(context_->device, stream, rows + (pass.rows() - 1) * width, w.norm_weight.data, w.norm_bias.data,
                     narrow, static_cast<Compute<T>*>(nullptr), static_cast<Compute<T>*>(nullptr), 1, width);
  context_->classifier.sample(stream, narrow, w.tokens.data, to.logits);
}

template <class D, class T>
void Head<D, T>::backward(Stream& stream, Params<T const> const& w, Params<Gradient> const& g, Pass const& pass,
                          T const* rows, NormStatistics<Compute<T>> const& norm, Evaluate const& to, double loss_weight,
                          double gradient_scale, T* gradient) const {
  auto const& work = context_->workspace;
  context_->classifier.backward(stream, pass, work.narrow, w.tokens.data, g.tokens, to, loss_weight, gradient_scale);
  layer_norm_backward(context_->device, stream, static_cast<T const*>(work.narrow), rows, w.norm_weight.data, norm.mean,
                      norm.scale, static_cast<T const*>(nullptr), gradient, g.norm_weight.data, g.norm_bias.data,
                      pass.rows(), context_->config.n_embd, work.partials, g.norm_weight.fresh);
}

}  // namespace nanogpt
