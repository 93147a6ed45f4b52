// SPDX-License-Identifier: Apache-2.0
// The shape of a GPT, with its tensor names, parameter counts and FLOP.
#pragma once

#include <cstdint>
#include <string_view>

#include "fsdp/error.hpp"
#include "transformer/layers/shape.hpp"
#include "transformer/tuning/tuning.hpp"

namespace nanogpt {

using namespace transformer;  // the parts that nanogpt and llama share

/// Parameters of a group of tensors.
struct ParameterCount {
  std::int64_t tensors = 0;
  std::int64_t elements = 0;
};

/// The non-linearity of the MLP, by the names that HuggingFace's config.json has for them.
enum class Activation {
  gelu,      ///< x Phi(x), exact: nanoGPT's
  gelu_new,  ///< Phi by tanh: GPT-2's and llm.c's
};

constexpr std::string_view name(Activation activation) { return activation == Activation::gelu ? "gelu" : "gelu_new"; }
/// @param where  the name stands, for the message
/// @throws fsdp::ConfigError if no activation is called so
inline Activation activation_named(std::string_view text, std::string_view where) {
  for (auto const activation : {Activation::gelu, Activation::gelu_new})
    if (text == name(activation)) return activation;
  fsdp::fail<fsdp::ConfigError>("'{}': 'activation': expected gelu or gelu_new, got '{}'", where, text);
}

/// The shape of a model. The defaults are GPT-2 124M without biases.
struct GptConfig {
  std::int64_t n_layer = 12;
  std::int64_t n_head = 12;
  std::int64_t n_embd = 768;       ///< C: width of the residual stream
  std::int64_t block_size = 1024;  ///< longest sequence, rows of the position table
  std::int64_t vocab_size = 50304;
  float dropout = 0.0f;  ///< probability of dropping, in [0, 1)
  bool bias = false;     ///< biases in linear layers and LayerNorms
  Activation activation = Activation::gelu;

  std::int64_t head_size() const { return n_embd / n_head; }
  AttentionShape attention() const { return {n_head, head_size()}; }

  /// Row length of the logits.
  std::int64_t padded_vocab() const { return padded_vocabulary(vocab_size); }

  /// Tensors of two dimensions: they decay. wte counts once although the head uses it too.
  ParameterCount decayed() const {
    return {2 + 4 * n_layer, (vocab_size + block_size) * n_embd + n_layer * 12 * n_embd * n_embd};
  }
  /// LayerNorm weights and all biases: they do not decay.
  ParameterCount not_decayed() const {
    std::int64_t const norms = 2 * n_layer + 1;
    if (!bias) return {norms, norms * n_embd};
    return {2 * norms + 4 * n_layer, 2 * norms * n_embd + n_layer * (3 + 1 + 4 + 1) * n_embd};
  }
  /// Parameters of a transformer block.
  std::int64_t layer_parameters() const { return 12 * n_embd * n_embd + n_embd * (bias ? 13 : 2); }
  std::int64_t parameters() const { return decayed().elements + not_decayed().elements; }
  /// The usual "number of parameters": all but the position table.
  std::int64_t parameters_without_positions() const { return parameters() - block_size * n_embd; }

  /// FLOP of one token's forward and backward: 6 N + 12 L H Q T, with N = parameters_without_positions(), Q the head
  /// size and T = block_size (Chowdhery et al., PaLM, appendix B).
  double flop_per_token() const {
    return 6.0 * static_cast<double>(parameters_without_positions()) +
           12.0 * static_cast<double>(n_layer * n_head * head_size() * block_size);
  }

  /// FLOP of one token if only some tensors train: 2 N for forward; in backward 2 for each parameter of the head and of
  /// the blocks that have a backward, 2 for each that trains, and attention of these blocks. Adapters are left out.
  double flop_per_token(Tuning const& tuning) const {
    if (tuning.trains_embeddings()) return flop_per_token();
    auto const layers = n_layer - tuning.layers_below(n_layer);
    auto const passed = vocab_size * n_embd + layers * layer_parameters();
    auto const trained = tuning.adapts() ? 0 : layers * layer_parameters();
    auto const attention = n_head * head_size() * block_size * (4 * n_layer + 8 * layers);
    return static_cast<double>(2 * parameters_without_positions() + 2 * passed + 2 * trained + attention);
  }

  /// @throws fsdp::ConfigError when no such model exists
  void validate() const {
    if (n_layer < 1 || n_head < 1 || n_embd < 1 || block_size < 1 || vocab_size < 1) {
      fsdp::fail<fsdp::ConfigError>(
          "model: n_layer {}, n_head {}, n_embd {}, block_size {} and vocab_size {} must all be positive", n_layer,
          n_head, n_embd, block_size, vocab_size);
    }
    if (n_embd % n_head != 0) {
      fsdp::fail<fsdp::ConfigError>("model: n_embd {} is not a multiple of n_head {}", n_embd, n_head);
    }
    if (!(dropout >= 0.0f && dropout < 1.0f)) {
      fsdp::fail<fsdp::ConfigError>("model: dropout {} lies outside [0, 1)", dropout);
    }
  }
};

}  // namespace nanogpt
