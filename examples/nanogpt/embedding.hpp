// SPDX-License-Identifier: Apache-2.0
// Token and position embedding.
#pragma once

#include <cstdint>

#include "context.hpp"
#include "fsdp/layout.hpp"
#include "transformer/kernels/row_kernels.hpp"

namespace nanogpt {

/// Rows of wte by token plus rows of wpe by position. wte is also the head's matrix: both modules share a unit.
template <class D, class T>
class Embedding {
 public:
  using Stream = typename D::Stream;
  using Gradient = fsdp::Gradient<Compute<T>>;
  static constexpr bool sets_gradients = true, skips_gradients = true;

  template <class E>
  struct Params {
    fsdp::Tensor<E, 2> tokens;     // (V, C)
    fsdp::Tensor<E, 2> positions;  // (block size, C)
  };

  explicit Embedding(Context<D, T> const& context) : context_(&context) {}

  template <class E, class Visit>
  void describe(Params<E>& p, Visit&& tensor) const {
    auto const& config = context_->config;
    fsdp::TensorOptions const options{.frozen = !context_->tuning.trains_embeddings()};
    tensor("wte.weight", p.tokens, {config.vocab_size, config.n_embd}, options);
    tensor("wpe.weight", p.positions, {config.block_size, config.n_embd}, options);
  }

  /// out (B, n, C) = token row + position row, dropped out.
  /// @param tokens  (B, n), in [0, V)
  void forward(Stream& stream, Params<T const> const& w, Pass const& pass, std::int32_t const* tokens, T* out) const;

  /// Adds to the gradients of both tables, which have rows that no token and no position names: fresh ones are zeroed
  /// first. wte's is not fresh where the head comes before. out_gradient (B, n, C) is overwritten.
  /// @pre pass.position == 0
  void backward(Stream& stream, Params<T const> const&, Params<Gradient> const& g, Pass const& pass,
                std::int32_t const* tokens, T* out_gradient) const;

 private:
  void zero(Stream& stream, fsdp::Tensor<Gradient, 2> const& table) const {
    context_->device.zero_async(stream, table.data, static_cast<std::size_t>(table.numel()) * sizeof *table.data);
  }
  void drop(Stream& stream, Pass const& pass, T* values) const {
    if (pass.mask.probability == 0.0f) return;
    auto const width = context_->config.n_embd;
    dropout(context_->device, stream, static_cast<T const*>(values), values, pass.rows() * width, pass.mask_at(-1, 0),
            pass.first_row() * width);
  }

  Context<D, T> const* context_;
};

template <class D, class T>
void Embedding<D, T>::forward(Stream& stream, Params<T const> const& w, Pass const& pass, std::int32_t const* tokens,
                              T* out) const {
  auto const width = context_->config.n_embd;
  embedding_forward(context_->device, stream, tokens, w.tokens.data, w.positions.data, out, pass.batch, pass.length,
                    width, pass.position);
  drop(stream, pass, out);
}

template <class D, class T>
void Embedding<D, T>::backward(Stream& stream, Params<T const> const&, Params<Gradient> const& g, Pass const& pass,
                               std::int32_t const* tokens, T* out_gradient) const {
  if (!g.tokens.wanted()) return;
  drop(stream, pass, out_gradient);
  if (g.tokens.fresh) zero(stream, g.tokens);
  if (g.positions.fresh) zero(stream, g.positions);
  embedding_backward(context_->device, stream, tokens, static_cast<T const*>(out_gradient), g.tokens.data,
                     g.positions.data, pass.batch, pass.length, context_->config.n_embd);
}

}  // namespace nanogpt
