// SPDX-License-Identifier: Apache-2.0
// The shape of a Llama (Touvron et al., arXiv:2302.13971), with its parameter counts, FLOP and limits.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "fsdp/error.hpp"
#include "transformer/kernels/rope.hpp"

namespace llama {

using namespace transformer;  // the parts that nanogpt and llama share

/// Names of the linear layers of a block, in the order of their tensors.
inline constexpr std::array<std::string_view, 7> linear_layers{
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj",    "mlp.up_proj",      "mlp.down_proj"};

/// The shape of a model, by the names of HuggingFace's config.json. The defaults are CodeLlama-7B.
struct LlamaConfig {
  std::int64_t hidden_size = 4096;         ///< C: width of the residual stream
  std::int64_t intermediate_size = 11008;  ///< F: width of the gate, and of what it gates
  std::int64_t num_hidden_layers = 32;
  std::int64_t num_attention_heads = 32;  ///< H
  std::int64_t num_key_value_heads = 32;  ///< K: divides H
  std::int64_t head_dim = 128;            ///< Q: H Q need not be C
  std::int64_t vocab_size = 32016;
  std::int64_t max_position_embeddings = 16384;  ///< tokens of the longest sequence
  double rms_norm_eps = 1e-5;
  double rope_theta = 1e6;
  RopeScaling rope_scaling{};
  bool tie_word_embeddings = false;  ///< the head's matrix is the embedding's
  std::int64_t sliding_window = 0;   ///< tokens that each token attends to, itself included; 0: all before it

  friend bool operator==(LlamaConfig const&, LlamaConfig const&) = default;

  /// Tokens of the longest sequence in which every token attends to all before it.
  std::int64_t longest_sequence() const {
    return sliding_window > 0 && sliding_window < max_position_embeddings ? sliding_window : max_position_embeddings;
  }
  /// The number that limits it, by its name in config.json.
  std::string_view longest_sequence_name() const {
    return longest_sequence() < max_position_embeddings ? "sliding_window" : "max_position_embeddings";
  }

  GroupedHeads heads() const { return {num_attention_heads, num_key_value_heads, head_dim}; }

  /// Row length of the logits: the vocabulary rounded up to 128. Weights keep exactly vocab_size rows; the columns
  /// from vocab_size on hold nothing and take no part in the softmax.
  std::int64_t padded_vocab() const { return (vocab_size + 127) / 128 * 128; }

  /// Parameters of the matrices of a layer: queries, keys and values; their mixture; gate, up and down.
  std::int64_t layer_matrices() const {
    return hidden_size * (heads().projected() + heads().width() + 3 * intermediate_size);
  }
  /// Parameters of a layer: its matrices and two norms.
  std::int64_t layer_parameters() const { return layer_matrices() + 2 * hidden_size; }
  /// Parameters of the embedding, which a tied head shares.
  std::int64_t table_parameters() const { return vocab_size * hidden_size; }
  std::int64_t parameters() const {
    return (tie_word_embeddings ? 1 : 2) * table_parameters() + num_hidden_layers * layer_parameters() + hidden_size;
  }
  /// Parameters that a token is multiplied with: all but an embedding that is not the head too.
  std::int64_t parameters_without_embedding() const {
    return parameters() - (tie_word_embeddings ? 0 : table_parameters());
  }

  /// FLOP of one token's forward and backward in sequences of `length`: 6 N + 12 L H Q T, with N =
  /// parameters_without_embedding() (Chowdhery et al., PaLM, appendix B).
  double flop_per_token(std::int64_t length) const {
    return 6.0 * static_cast<double>(parameters_without_embedding()) +
           12.0 * static_cast<double>(num_hidden_layers * heads().width()) * static_cast<double>(length);
  }

  /// @param what  describes the model, for messages: "model", or "'config.json'"
  /// @throws fsdp::ConfigError when no such model exists, or numbers are so large that counts might overflow
  void validate(std::string_view what = "model") const {
    struct Extent {
      std::string_view name;
      std::int64_t value, most;
    };
    // The largest product, 3 L C F, is below 2^59.
    Extent const extents[] = {{"hidden_size", hidden_size, 1'000'000},
                              {"intermediate_size", intermediate_size, 10'000'000},
                              {"num_hidden_layers", num_hidden_layers, 10'000},
                              {"num_attention_heads", num_attention_heads, 10'000},
                              {"num_key_value_heads", num_key_value_heads, 10'000},
                              {"head_dim", head_dim, 1'000},
                              {"vocab_size", vocab_size, 100'000'000},
                              {"max_position_embeddings", max_position_embeddings, 100'000'000}};
    for (auto const& extent : extents)
      if (extent.value < 1 || extent.value > extent.most)
        fsdp::fail<fsdp::ConfigError>("{}: '{}': expected a whole number from 1 to {}, got {}", what, extent.name,
                                      extent.most, extent.value);
    if (hidden_size % num_attention_heads != 0)  // transformers 5 asks for it even where there is a head_dim
      fsdp::fail<fsdp::ConfigError>("{}: 'num_attention_heads': expected a divisor of hidden_size {}, got {}", what,
                                    hidden_size, num_attention_heads);
    if (num_attention_heads % num_key_value_heads != 0)
      fsdp::fail<fsdp::ConfigError>("{}: 'num_key_value_heads': expected a divisor of num_attention_heads {}, got {}",
                                    what, num_attention_heads, num_key_value_heads);
    if (head_dim % 2 != 0)
      fsdp::fail<fsdp::ConfigError>("{}: 'head_dim': expected an even number, got {}", what, head_dim);
    expect_between(what, "rms_norm_eps", rms_norm_eps, 1e-30, 1.0);
    expect_between(what, "rope_theta", rope_theta, 1.0, 1e15);
    auto const& s = rope_scaling;
    if (s.kind == RopeScaling::Kind::none) return;
    expect_between(what, "factor", s.factor, 1.0, 1e6);
    if (s.kind == RopeScaling::Kind::linear) return;
    expect_between(what, "low_freq_factor", s.low_freq_factor, 1e-3, 1e6);
    expect_between(what, "high_freq_factor", s.high_freq_factor, 1e-3, 1e6);
    if (s.low_freq_factor >= s.high_freq_factor)
      fsdp::fail<fsdp::ConfigError>("{}: 'low_freq_factor': expected less than high_freq_factor {}, got {}", what,
                                    s.high_freq_factor, s.low_freq_factor);
    if (s.original_max_position_embeddings < 1 || s.original_max_position_embeddings > 100'000'000)
      fsdp::fail<fsdp::ConfigError>(
          "{}: 'original_max_position_embeddings': expected a whole number from 1 to 100000000, got {}", what,
          s.original_max_position_embeddings);
  }

 private:
  static void expect_between(std::string_view what, std::string_view name, double value, double low, double high) {
    if (!(value >= low && value <= high))  // NaN is neither
      fsdp::fail<fsdp::ConfigError>("{}: '{}': expected a number from {} to {}, got {}", what, name, low, high, value);
  }
};

}  // namespace llama
