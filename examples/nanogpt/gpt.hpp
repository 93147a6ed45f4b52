// SPDX-License-Identifier: Apache-2.0
// A GPT: token and position embedding, blocks, and a head that shares the token embedding's matrix.
#pragma once

#include <cstdint>
#include <string_view>

#include "activations.hpp"
#include "block.hpp"
#include "context.hpp"
#include "embedding.hpp"
#include "gpt_config.hpp"
#include "head.hpp"
#include "transformer/layers/decoder.hpp"

namespace nanogpt {

using GptOptions = DecoderOptions;

/// Options that suit a device.
template <class D>
GptOptions gpt_options() {
  return decoder_options<D>();
}

/// The layers of a GPT and their tensors' names: transformer.wte, transformer.h.0.attn.c_attn, transformer.ln_f.
struct GptLayers {
  using Config = GptConfig;
  template <class D, class T>
  using Embedding = nanogpt::Embedding<D, T>;
  template <class D, class T>
  using Block = nanogpt::Block<D, T>;
  template <class D, class T>
  using Head = nanogpt::Head<D, T>;
  template <class D, class T>
  using Activations = nanogpt::Activations<D, T>;
  template <class D, class T>
  using Context = nanogpt::Context<D, T>;

  static constexpr std::string_view embedding = "transformer", blocks = "transformer.h", head = "transformer";

  static DecoderShape shape(GptConfig const& config) {
    return {.layers = config.n_layer,
            .width = config.n_embd,
            .vocabulary = config.vocab_size,
            .positions = config.block_size,
            .positions_field = "block_size",
            .dropout = config.dropout,
            .attention = config.attention(),
            .tied = true};
  }
};

/// A GPT on an engine E, which must outlive it: Decoder has what it does.
///
/// Its units are the embeddings with the head (one root unit, wte is tied), and every block or, as the options say,
/// neighbouring blocks.
template <class E>
class Gpt : public Decoder<E, GptLayers> {
 public:
  Gpt(E& engine, GptConfig const& config, std::int64_t batch, std::int64_t length, GptOptions const& options = {})
      : Decoder<E, GptLayers>(engine, config, batch, length, options) {}
};

}  // namespace nanogpt
