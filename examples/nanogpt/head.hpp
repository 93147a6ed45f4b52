// SPDX-License-Identifier: Apache-2.0
// The last LayerNorm and the classifier, which is the token embedding's matrix.
#pragma once

#include <algorithm>
#include <cstdint>

#include "context.hpp"
#include "fsdp/layout.hpp"
#include "transformer/kernels/row_kernels.hpp"
#include "transformer/math/gemm.hpp"

namespace nanogpt {

/// [Note: Logits in parts]
/// The logits of all rows, (B T, V), never exist at once: ActivationPlan::logits_rows of them do. Training computes
/// them once, in backward, where the gradient slot of wte is at hand: a part's logits, their loss and gradient in
/// place, then at once both products of that gradient. Forward only normalises.
///
/// How a pass through the head ends: nothing more (training), a loss (evaluation), or logits (sampling).
struct Normalise {};

/// *loss += mean cross-entropy of the pass. A negative target counts as a row without loss.
struct Evaluate {
  std::int32_t const* targets;  // (B n)
  double* loss;                 // device memory
};

/// logits (V) of the pass's last row.
template <class T>
struct Sample {
  T* logits;
};

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
           fsdp::TensorOptions{.frozen = !tuning.trains_embeddings()});
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
  template <class Body>
  void each_part(Pass const& pass, Body&& body) const {
    std::int64_t const rows = pass.rows(), part = context_->plan.logits_rows(context_->config);
    for (std::int64_t first = 0; first < rows; first += part) body(first, std::min(part, rows - first));
  }
  void logits(Stream& stream, Params<T const> const& w, T const* normal, std::int64_t rows) const {
    auto const& config = context_->config;
    linear(*context_->gemm, stream, rows, config.n_embd, config.vocab_size, normal, w.tokens.data,
           context_->workspace.logits, config.padded_vocab());
  }
  void add_loss(Stream& stream, Pass const& pass, double weight, double* loss) const {
    sum(context_->device, stream, static_cast<Compute<T> const*>(context_->workspace.row_losses), pass.rows(),
        weight / static_cast<double>(pass.rows()), loss, true);
  }

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
  auto const& work = context_->workspace;
  each_part(pass, [&](std::int64_t first, std::int64_t count) {
    logits(stream, w, work.narrow + first * context_->config.n_embd, count);
    cross_entropy_forward(context_->device, stream, work.logits, to.targets + first, work.row_losses + first, count,
                          context_->config.vocab_size, context_->config.padded_vocab());
  });
  add_loss(stream, pass, 1.0, to.loss);
}

template <class D, class T>
void Head<D, T>::forward(Stream& stream, Params<T const> const& w, Pass const& pass, T const* rows,
                         NormStatistics<Compute<T>> const&, Sample<T> const& to) const {
  auto const width = context_->config.n_embd;
  T* const narrow = context_->workspace.narrow;
  layer_norm_forward(context_->device, stream, rows + (pass.rows() - 1) * width, w.norm_weight.data, w.norm_bias.data,
                     narrow, static_cast<Compute<T>*>(nullptr), static_cast<Compute<T>*>(nullptr), 1, width);
  linear(*context_->gemm, stream, 1, width, context_->config.vocab_size, narrow, w.tokens.data, to.logits,
         context_->config.vocab_size);
}

template <class D, class T>
void Head<D, T>::backward(Stream& stream, Params<T const> const& w, Params<Gradient> const& g, Pass const& pass,
                          T const* rows, NormStatistics<Compute<T>> const& norm, Evaluate const& to, double loss_weight,
                          double gradient_scale, T* gradient) const {
  auto const& config = context_->config;
  auto const& work = context_->workspace;
  auto& gemm = *context_->gemm;
  auto const width = config.n_embd, vocabulary = config.vocab_size, padded = config.padded_vocab();
  double const scale = loss_weight * gradient_scale / static_cast<double>(pass.rows());
  each_part(pass, [&](std::int64_t first, std::int64_t count) {
    T* const normal = work.narrow + first * width;
    logits(stream, w, normal, count);
    cross_entropy_backward(context_->device, stream, work.logits, to.targets + first, work.row_losses + first, count,
                           vocabulary, padded, scale);
    linear_weight_gradient(gemm, stream, count, width, vocabulary, normal, work.logits, padded, g.tokens.data,
                           g.tokens.fresh && first == 0);
    linear_input_gradient(gemm, stream, count, width, vocabulary, work.logits, padded, w.tokens.data, normal);
  });
  layer_norm_backward(context_->device, stream, static_cast<T const*>(work.narrow), rows, w.norm_weight.data, norm.mean,
                      norm.scale, static_cast<T const*>(nullptr), gradient, g.norm_weight.data, g.norm_bias.data,
                      pass.rows(), width, work.partials, g.norm_weight.fresh);
  add_loss(stream, pass, loss_weight, to.loss);
}

}  // namespace nanogpt
