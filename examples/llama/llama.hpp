// SPDX-License-Identifier: Apache-2.0
// A Llama: token embedding, blocks, and a head, whose matrix is the embedding's or its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "activations.hpp"
#include "block.hpp"
#include "context.hpp"
#include "embedding.hpp"
#include "head.hpp"
#include "llama_config.hpp"
#include "transformer/kernels/rope_table.hpp"
#include "transformer/layers/decoder.hpp"

namespace llama {

using LlamaOptions = DecoderOptions;

/// The layers of a Llama. Tensors have the names of HuggingFace's checkpoints: model.embed_tokens.weight,
/// model.layers.0.self_attn.q_proj.weight, model.norm.weight, lm_head.weight.
struct LlamaLayers {
  using Config = LlamaConfig;
  template <class D, class T>
  using Embedding = llama::Embedding<D, T>;
  template <class D, class T>
  using Block = llama::Block<D, T>;
  template <class D, class T>
  using Head = llama::Head<D, T>;
  template <class D, class T>
  using Activations = llama::Activations<D, T>;
  template <class D, class T>
  using Context = llama::Context<D, T>;

  static constexpr std::string_view embedding = "model", blocks = "model.layers", head = "";

  static DecoderShape shape(LlamaConfig const& config) {
    return {.layers = config.num_hidden_layers,
            .width = config.hidden_size,
            .vocabulary = config.vocab_size,
            .positions = config.longest_sequence(),
            .positions_field = config.longest_sequence_name(),
            .dropout = 0.0f,
            .attention = attention_of(config),
            .tied = config.tie_word_embeddings};
  }
};

/// A Llama on an engine E, which must outlive it: Decoder has what it does.
///
/// Its units are: every block or, as the options say, neighbouring blocks; the embedding and the head, together in the
/// root unit if they are tied, else each by itself.
template <class E>
class Llama : public Decoder<E, LlamaLayers> {
 public:
  /// @param length  tokens of a sequence; of a text that is decoded: prompt and new tokens, for whose keys there is
  /// room
  Llama(E& engine, LlamaConfig const& config, std::int64_t batch, std::int64_t length, LlamaOptions const& options = {})
      : Decoder<E, LlamaLayers>(engine, config, batch, length, options) {
    auto const table = rope_table(config.rope_scaling, config.rope_theta, config.head_dim, length);
    auto const& device = engine.device();
    device.copy_async(engine.compute(), this->activations().workspace().rotations, table.data(),
                      table.size() * sizeof(float));
    device.synchronize(engine.compute());  // the table goes with this call
  }
};

}  // namespace llama
