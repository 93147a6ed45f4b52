// SPDX-License-Identifier: Apache-2.0
// Token embedding.
#pragma once

#include <cstddef>
#include <cstdint>

#include "context.hpp"
#include "fsdp/layout.hpp"
#include "transformer/kernels/embedding.hpp"
#include "transformer/layers/pass.hpp"

namespace llama {

/// Rows of the table by token. In a tied model it is also the head's matrix: both modules share a unit.
template <class D, class T>
class Embedding {
 public:
  using Stream = typename D::Stream;
  using Gradient = fsdp::Gradient<Compute<T>>;
  static constexpr bool sets_gradients = true, skips_gradients = true;

  template <class E>
  struct Params {
    fsdp::Tensor<E, 2> tokens;  // (V, C)
  };

  explicit Embedding(Context<D, T> const& context) : context_(&context) {}

  template <class E, class Visit>
  void describe(Params<E>& p, Visit&& tensor) const {
    auto const& config = context_->config;
    tensor("embed_tokens.weight", p.tokens, {config.vocab_size, config.hidden_size},
           fsdp::TensorOptions{.frozen = !context_->tuning.trains_embeddings()});
  }

  /// out (B, n, C) = token row.
  /// @param tokens  (B, n), in [0, V)
  void forward(Stream& stream, Params<T const> const& w, Pass const& pass, std::int32_t const* tokens, T* out) const;

  /// Adds to the table's gradient, which has rows that no token names: a fresh one is zeroed first. In a tied model it
  /// is not fresh, for the head comes before.
  void backward(Stream& stream, Params<T const> const&, Params<Gradient> const& g, Pass const& pass,
                std::int32_t const* tokens, T const* out_gradient) const;

 private:
  Context<D, T> const* context_;
};

template <class D, class T>
void Embedding<D, T>::forward(Stream& stream, Params<T const> const& w, Pass const& pass, std::int32_t const* tokens,
                              T* out) const {
  token_embedding_forward(context_->device, stream, tokens, w.tokens.data, out, pass.rows(),
                          context_->config.hidden_size);
}

template <class D, class T>
void Embedding<D, T>::backward(Stream& stream, Params<T const> const&, Params<Gradient> const& g, Pass const& pass,
                               std::int32_t const* tokens, T const* out_gradient) const {
  if (!g.tokens.wanted()) return;
  auto* const table = g.tokens.data;
  if (g.tokens.fresh)
    context_->device.zero_async(stream, table, static_cast<std::size_t>(g.tokens.numel()) * sizeof *table);
  token_embedding_backward(context_->device, stream, tokens, out_gradient, table, pass.rows(),
                           context_->config.hidden_size);
}

}  // namespace llama
