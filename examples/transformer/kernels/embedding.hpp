// SPDX-License-Identifier: Apache-2.0
// Token and position embeddings, forward and backward.
#pragma once

#include <cstdint>
#include <type_traits>

#include "transformer/kernels/common.hpp"

namespace transformer {

namespace detail {

/// Blocks that share the vocabulary in the gradient of the token embedding.
inline constexpr std::int64_t token_parts = 256;

struct EmbeddingForward {
  template <class Block, class A, class W, class Index>
  FSDP_HD void operator()(Block const& block, std::int64_t row, Index const* tokens, W const* token_weight,
                          W const* position_weight, A* out, std::int64_t length, std::int64_t first,
                          std::int64_t columns) const {
    using T = Compute<W>;
    block.each(
        columns, out + row * columns, [](T token, T position) { return token + position; },
        token_weight + static_cast<std::int64_t>(tokens[row]) * columns,
        position_weight + (first + row % length) * columns);
  }
};

struct TokenForward {
  template <class Block, class A, class W, class Index>
  FSDP_HD void operator()(Block const& block, std::int64_t row, Index const* tokens, W const* token_weight, A* out,
                          std::int64_t columns) const {
    block.each(
        columns, out + row * columns, [](Compute<W> token) { return token; },
        token_weight + static_cast<std::int64_t>(tokens[row]) * columns);
  }
};

/// Adds rows to the gradients of their tokens, those of one token in row order. Several blocks each take the tokens of
/// one remainder; a single lane takes all at once.
struct TokenBackward {
  template <class Block, class A, class G, class Index>
  FSDP_HD void operator()(Block const& block, std::int64_t part, Index const* tokens, A const* dy, G* gradient,
                          std::int64_t rows, std::int64_t columns) const {
    constexpr bool whole = std::is_same_v<Block, fsdp::HostBlock>;
    if (whole && part > 0) return;
    for (std::int64_t row = 0; row < rows; ++row) {
      auto const token = static_cast<std::int64_t>(tokens[row]);
      if (!whole && token % token_parts != part) continue;
      G* const to = gradient + token * columns;
      A const* const from = dy + row * columns;
      block.update(
          columns, [](Compute<G>& g, Compute<A> v) { g += static_cast<Compute<G>>(v); }, to, from);
    }
  }
};

struct PositionBackward {
  template <class Block, class A, class G>
  FSDP_HD void operator()(Block const& block, std::int64_t position, A const* dy, G* gradient, std::int64_t batch,
                          std::int64_t length, std::int64_t columns) const {
    G* const to = gradient + position * columns;
    for (std::int64_t b = 0; b < batch; ++b) {
      block.update(
          columns, [](Compute<G>& g, Compute<A> v) { g += static_cast<Compute<G>>(v); }, to,
          dy + (b * length + position) * columns);
    }
  }
};

}  // namespace detail

/// out (batch, length, columns) = token_weight[token] + position_weight[first + position].
/// @param tokens  (batch, length)
/// @param first   position of the first column of tokens
template <fsdp::Device D, class A, class W, class Index>
void embedding_forward(D const& device, typename D::Stream& stream, Index const* tokens, W const* token_weight,
                       W const* position_weight, A* out, std::int64_t batch, std::int64_t length, std::int64_t columns,
                       std::int64_t first = 0) {
  if (batch * length == 0) return;
  device.launch(stream, batch * length, detail::EmbeddingForward{}, tokens, token_weight, position_weight, out, length,
                first, columns);
}

/// token_gradient[token] += dy, in row order; position_gradient[position] += dy, over the batch in order.
/// @param dy  (batch, length, columns), rows that began at position 0
template <fsdp::Device D, class A, class G, class Index>
void embedding_backward(D const& device, typename D::Stream& stream, Index const* tokens, A const* dy,
                        G* token_gradient, G* position_gradient, std::int64_t batch, std::int64_t length,
                        std::int64_t columns) {
  if (batch * length == 0) return;
  device.launch(stream, detail::token_parts, detail::TokenBackward{}, tokens, dy, token_gradient, batch * length,
                columns);
  device.launch(stream, length, detail::PositionBackward{}, dy, position_gradient, batch, length, columns);
}

/// out (rows, columns) = token_weight[token]: the embedding of a model without a position table.
template <fsdp::Device D, class A, class W, class Index>
void token_embedding_forward(D const& device, typename D::Stream& stream, Index const* tokens, W const* token_weight,
                             A* out, std::int64_t rows, std::int64_t columns) {
  if (rows > 0) device.launch(stream, rows, detail::TokenForward{}, tokens, token_weight, out, columns);
}

/// token_gradient[token] += dy (rows, columns), in row order.
template <fsdp::Device D, class A, class G, class Index>
void token_embedding_backward(D const& device, typename D::Stream& stream, Index const* tokens, A const* dy,
                              G* token_gradient, std::int64_t rows, std::int64_t columns) {
  if (rows == 0) return;
  device.launch(stream, detail::token_parts, detail::TokenBackward{}, tokens, dy, token_gradient, rows, columns);
}

}  // namespace transformer
