// SPDX-License-Identifier: Apache-2.0
// The Llama of HuggingFace's modeling_llama.py: embedding, blocks and head, each with its forward and its backward.
//
// B: sequences of a pass, n: tokens of a sequence, C: hidden size, F: intermediate size, V: vocab_size, H and K: heads
// of queries and of keys, Q: head_dim, A = H Q: width of the queries. A matrix W (out, in) is stored as nn.Linear
// stores it. T is the element type of parameters and activations; gradients of parameters are Compute<T>. A gradient is
// fresh until backward has written it for the first time after a step: then it is assigned, and afterwards added to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "fsdp/layout.hpp"
#include "llama/activations.hpp"
#include "llama/llama_config.hpp"
#include "transformer/attention/causal_attention.hpp"
#include "transformer/kernels/activation.hpp"
#include "transformer/kernels/embedding.hpp"
#include "transformer/kernels/rms_norm.hpp"
#include "transformer/kernels/rope.hpp"
#include "transformer/kernels/rope_table.hpp"
#include "transformer/kernels/swiglu.hpp"
#include "transformer/layers/classifier.hpp"
#include "transformer/layers/context.hpp"
#include "transformer/layers/decoder.hpp"
#include "transformer/layers/joined_linear.hpp"
#include "transformer/layers/linear.hpp"
#include "transformer/layers/pass.hpp"

namespace llama {

/// The configuration, the matrix products and the scratch buffers that all layers share.
template <class D, class T>
using Context = LayerContext<D, T, LlamaConfig, Workspace<T>>;

/// The formulas of a Llama, for the rows (B n) of one pass. Every function enqueues kernels on the pass's stream.
/// The linear functions of LinearPass also compute the layer's adapter (LoRA), if it has one.
template <class D, class T>
class Formulas : public LinearPass<D, T> {
  using Base = LinearPass<D, T>;
  using Base::device, Base::stream, Base::rows, Base::partials;

 public:
  using Real = Compute<T>;
  using Gradient = typename Base::Gradient;

  Formulas(Context<D, T> const& context, typename D::Stream& on, std::int64_t row_count)
      : Base{context.device, on, *context.gemm, context.adapters, context.workspace.partials, row_count},
        config_(context.config),
        rotations_(context.workspace.rotations) {}

  /// y (B n, C) = x / root mean square of x * weight. @param scale  (B n): the statistic, for backward; may be null
  void norm(fsdp::Tensor<T const, 1> const& weight, T const* x, Real* scale, T* y) const {
    rms_norm_forward(device, stream, x, weight.data, y, scale, rows, config_.hidden_size, config_.rms_norm_eps);
  }
  /// dx = skip + the gradient that dy, of y = norm(x), gives x; adds to the gradient of the weight.
  /// @param skip  (B n, C): gradient that reaches x past the norm, or null for 0; may be dx
  void norm_backward(fsdp::Tensor<T const, 1> const& weight, fsdp::Tensor<Gradient, 1> const& g, T const* x,
                     Real const* scale, T const* dy, T const* skip, T* dx) const {
    rms_norm_backward(device, stream, dy, x, weight.data, scale, skip, dx, g.data, rows, config_.hidden_size, partials,
                      g.fresh);
  }
  /// qkv (B n, 3A) = queries and keys of x (B n, A + 2 K Q) rotated by their positions, and values; keys and values are
  /// repeated for the heads of their group.
  void rope(Pass const& pass, T const* x, T* qkv) const {
    rope_forward(device, stream, config_.heads(), pass, x, rotations_, qkv);
  }
  /// dx (B n, A + 2 K Q), given dqkv (B n, 3A).
  void rope_backward(Pass const& pass, T const* dqkv, T* dx) const {
    transformer::rope_backward(device, stream, config_.heads(), pass, dqkv, rotations_, dx);
  }
  /// y = x + branch.
  void add_branch(T const* x, T const* branch, T* y) const {
    bias_residual_forward(device, stream, x, branch, static_cast<T const*>(nullptr), y, rows, config_.hidden_size);
  }
  /// y = x + branch; branch = norm(y).
  void add_branch_and_norm(T const* x, T* y, fsdp::Tensor<T const, 1> const& weight, Real* scale, T* branch) const {
    residual_rms_norm_forward(device, stream, x, static_cast<T const*>(branch), y, weight.data, branch, scale, rows,
                              config_.hidden_size, config_.rms_norm_eps);
  }
  /// y (B n, F) = silu(gate) * up.
  void swiglu(T const* gate_up, T* y) const {
    swiglu_forward(device, stream, gate_up, y, rows, config_.intermediate_size);
  }
  /// gate_up (B n, 2F) becomes its gradient. dy (B n, F), the gradient of y, becomes y, which the gradient of down's
  /// weight needs.
  void swiglu_backward(T* gate_up, T* dy) const {
    transformer::swiglu_backward(device, stream, gate_up, dy, rows, config_.intermediate_size);
  }

 private:
  LlamaConfig const& config_;
  float const* rotations_;  // (T, Q)
};

/// Rows of the table by token. In a tied model it is also the head's matrix: both layers are in the root unit, whose
/// parameters are gathered together.
template <class D, class T>
class Embedding {
 public:
  using Stream = typename D::Stream;
  using Gradient = fsdp::Gradient<Compute<T>>;
  // Backward assigns fresh gradients, so that the engine zeroes none, and leaves out those that are not wanted.
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

  /// x (B, n, C) = row of the token.
  /// @param tokens  (B, n), in [0, V)
  void forward(Stream& stream, Params<T const> const& w, Pass const& pass, std::int32_t const* tokens, T* x) const;

  /// Adds dx (B, n, C) to the table's gradient. The table has rows that no token names, so a fresh gradient is zeroed
  /// first. In a tied model it is fresh only if the head's backward has left it out.
  void backward(Stream& stream, Params<T const> const&, Params<Gradient> const& g, Pass const& pass,
                std::int32_t const* tokens, T const* dx) const;

 private:
  Context<D, T> const* context_;
};

template <class D, class T>
void Embedding<D, T>::forward(Stream& stream, Params<T const> const& w, Pass const& pass, std::int32_t const* tokens,
                              T* x) const {
  token_embedding_forward(context_->device, stream, tokens, w.tokens.data, x, pass.rows(),
                          context_->config.hidden_size);
}

template <class D, class T>
void Embedding<D, T>::backward(Stream& stream, Params<T const> const&, Params<Gradient> const& g, Pass const& pass,
                               std::int32_t const* tokens, T const* dx) const {
  if (!g.tokens.wanted()) return;
  auto* const table = g.tokens.data;
  if (g.tokens.fresh)
    context_->device.zero_async(stream, table, static_cast<std::size_t>(g.tokens.numel()) * sizeof *table);
  token_embedding_backward(context_->device, stream, tokens, dx, table, pass.rows(), context_->config.hidden_size);
}

/// A block: x + attention(norm_1(x)), then x + mlp(norm_2(x)), without biases.
template <class D, class T>
class Block {
 public:
  using Stream = typename D::Stream;
  using Gradient = fsdp::Gradient<Compute<T>>;
  static constexpr bool sets_gradients = true, skips_gradients = true;
  static constexpr auto linear_layers = llama::linear_layers;

  template <class E>
  struct Params {
    fsdp::Tensor<E, 1> norm_1;   // (C)
    JoinedLinear<E, 3> qkv;      // (A, C), (K Q, C), (K Q, C)
    Linear<E> o;                 // (C, A)
    fsdp::Tensor<E, 1> norm_2;   // (C)
    JoinedLinear<E, 2> gate_up;  // (F, C), (F, C)
    Linear<E> down;              // (C, F)
  };

  Block(Context<D, T> const& context, std::int64_t layer)
      : context_(&context), attention_(context.attention), layer_(layer) {}

  template <class E, class Visit>
  void describe(Params<E>& p, Visit&& tensor) const {
    auto const& config = context_->config;
    auto const width = config.hidden_size, hidden = config.intermediate_size, size = config.head_dim;
    auto const queries = config.num_attention_heads * size, keys = config.num_key_value_heads * size;
    bool const frozen = !context_->tuning.trains(layer_, config.num_hidden_layers);
    fsdp::TensorOptions const ones{.decay = false, .init = fsdp::init::ones, .frozen = frozen};
    auto const matrix = [&](std::size_t which, fsdp::Tensor<E, 2>& of, std::int64_t out, std::int64_t in) {
      tensor(std::string(linear_layers[which]) + ".weight", of, {out, in}, fsdp::TensorOptions{.frozen = frozen});
    };
    tensor("input_layernorm.weight", p.norm_1, {width}, ones);
    matrix(0, p.qkv.weights[0], queries, width);
    matrix(1, p.qkv.weights[1], keys, width);
    matrix(2, p.qkv.weights[2], keys, width);
    matrix(3, p.o.weight, width, queries);
    tensor("post_attention_layernorm.weight", p.norm_2, {width}, ones);
    matrix(4, p.gate_up.weights[0], hidden, width);
    matrix(5, p.gate_up.weights[1], hidden, width);
    matrix(6, p.down.weight, width, hidden);
    auto const adapter = [&](std::size_t which, Adapter<E>& of, std::int64_t out, std::int64_t in) {
      describe_adapter(context_->tuning, of, linear_layers[which], out, in, tensor);
    };
    adapter(0, p.qkv.adapters[0], queries, width);
    adapter(1, p.qkv.adapters[1], keys, width);
    adapter(2, p.qkv.adapters[2], keys, width);
    adapter(3, p.o.adapter, width, queries);
    adapter(4, p.gate_up.adapters[0], hidden, width);
    adapter(5, p.gate_up.adapters[1], hidden, width);
    adapter(6, p.down.adapter, width, hidden);
  }

  /// a.output = block of a.input; fills the rest of `a`. Overwrites the workspace's wide, narrow and scores.
  /// @param part  Forward::without_output computes only what backward needs, and leaves a.output alone
  void forward(Stream& stream, Params<T const> const& w, Pass const& pass, BlockActivations<T> const& a,
               Forward part = Forward::all) const;

  /// Adds to the gradients of the parameters. `gradient` (B n, C) comes in as that of a.output and goes out as that of
  /// a.input. Overwrites a.gate_up, a.qkv, and the workspace's wide, narrow, scores and partials.
  /// @pre forward of the same pass has filled `a`, or a.input alone if the block is recomputed
  void backward(Stream& stream, Params<T const> const& w, Params<Gradient> const& g, Pass const& pass,
                BlockActivations<T> const& a, T* gradient) const;

 private:
  Context<D, T> const* context_;
  CausalAttention<D, T> attention_;
  std::int64_t layer_;
};

// Steps: 1 norm_1, 2 qkv, 3 rotary positions, 4 attention, 5 o and residual, 6 norm_2, 7 gate_up, 8 SwiGLU, 9 down and
// residual. A comment in forward names the result, one in backward the value whose gradient is computed. `narrow` and
// `wide` are scratch that all blocks share: their contents are lost after forward, and backward computes 1, 6 and 8
// again.
template <class D, class T>
void Block<D, T>::forward(Stream& stream, Params<T const> const& w, Pass const& pass, BlockActivations<T> const& a,
                          Forward part) const {
  Formulas<D, T> const f(*context_, stream, pass.rows());
  T *const narrow = context_->workspace.narrow, *const wide = context_->workspace.wide;

  f.norm(w.norm_1, a.input, a.scale_1, narrow);                                 // 1: narrow (B n, C)
  joined_linear(f, w.qkv, narrow, wide);                                        // 2: wide (B n, A + 2 K Q)
  f.rope(pass, wide, a.qkv);                                                    // 3: a.qkv (B n, 3A)
  attention_.forward(stream, pass, {}, a.qkv, a.attention_output, a.log_sums);  // 4: (B n, A)
  f.linear(w.o, a.attention_output, narrow);                                    // 5: narrow (B n, C)
  f.add_branch_and_norm(a.input, a.residual, w.norm_2, a.scale_2, narrow);      // 5, 6: a.residual, narrow (B n, C)
  joined_linear(f, w.gate_up, narrow, a.gate_up);                               // 7: a.gate_up (B n, 2F)
  if (part == Forward::without_output) return;
  f.swiglu(a.gate_up, wide);                   // 8: wide (B n, F)
  f.linear(w.down, wide, narrow);              // 9: narrow (B n, C)
  f.add_branch(a.residual, narrow, a.output);  // 9: a.output (B n, C)
}

template <class D, class T>
void Block<D, T>::backward(Stream& stream, Params<T const> const& w, Params<Gradient> const& g, Pass const& pass,
                           BlockActivations<T> const& a, T* gradient) const {
  Formulas<D, T> const f(*context_, stream, pass.rows());
  T *const narrow = context_->workspace.narrow, *const wide = context_->workspace.wide;
  // A block that is recomputed alone fills `a` again here; Decoder::recompute_segment does so for several.
  if (context_->plan.segment == 1 && context_->plan.recomputes(layer_))
    forward(stream, w, pass, a, Forward::without_output);

  f.linear_input_gradient(w.down, gradient, wide);               // 9: SwiGLU's result
  f.swiglu_backward(a.gate_up, wide);                            // 8: a.gate_up, in its place; wide = SwiGLU's result
  f.linear_parameter_gradients(w.down, g.down, wide, gradient);  // 9: weight, from SwiGLU's result
  if (g.gate_up.wants_input()) f.norm(w.norm_2, a.residual, a.scale_2, narrow);          // norm_2's result again
  joined_linear_backward(f, w.gate_up, g.gate_up, narrow, a.gate_up, wide);              // 7: weights, norm_2's result
  f.norm_backward(w.norm_2, g.norm_2, a.residual, a.scale_2, wide, gradient, gradient);  // 6 and 5: a.residual

  f.linear_backward(w.o, g.o, a.attention_output, gradient, narrow);  // 5: weight, then attention_output
  attention_.backward(stream, pass, {}, a.qkv, a.attention_output, a.log_sums, narrow, wide);  // 4: a.qkv
  f.rope_backward(pass, wide, a.qkv);                                                 // 3: step 2's result, in a.qkv
  if (g.qkv.wants_input()) f.norm(w.norm_1, a.input, a.scale_1, narrow);              // norm_1's result again
  joined_linear_backward(f, w.qkv, g.qkv, narrow, a.qkv, wide);                       // 2: weights, norm_1's result
  f.norm_backward(w.norm_1, g.norm_1, a.input, a.scale_1, wide, gradient, gradient);  // 1: a.input
}

/// The last RMSNorm and the classifier. In a tied model its matrix is the embedding's: both layers describe the same
/// tensor.
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

  /// Training: normalises x (B n, C) into the workspace's narrow, where backward finds it. Logits and loss are computed
  /// in backward: [Note: Logits in parts] in classifier.hpp.
  /// @param scale  (B n): the norm's statistic
  void forward(Stream& stream, Params<T const> const& w, Pass const& pass, T const* x, Real* scale, Normalise) const {
    Formulas<D, T>(*context_, stream, pass.rows()).norm(w.norm, x, scale, context_->workspace.narrow);
  }
  /// Evaluation: adds the mean cross-entropy.
  void forward(Stream& stream, Params<T const> const& w, Pass const& pass, T const* x, Real* scale,
               LossTarget const& to) const {
    forward(stream, w, pass, x, scale, Normalise{});
    context_->classifier.evaluate(stream, pass, context_->workspace.narrow, w.matrix.data, to);
  }
  /// Decoding: logits of the last row.
  void forward(Stream& stream, Params<T const> const& w, Pass const& pass, T const* x, Real*,
               Sample<T> const& to) const {
    T const* const last = x + (pass.rows() - 1) * context_->config.hidden_size;
    Formulas<D, T>(*context_, stream, 1).norm(w.norm, last, nullptr, context_->workspace.narrow);
    context_->classifier.sample(stream, context_->workspace.narrow, w.matrix.data, to.logits);
  }

  /// *loss.loss += loss.weight * mean cross-entropy. Its gradients times gradient_scale are added to g, and are dx.
  /// @pre forward(..., Normalise) of the same pass, and nothing since that uses the workspace
  void backward(Stream& stream, Params<T const> const& w, Params<Gradient> const& g, Pass const& pass, T const* x,
                Real const* scale, LossTarget const& loss, double gradient_scale, T* dx) const {
    T* const narrow = context_->workspace.narrow;
    context_->classifier.backward(stream, pass, narrow, w.matrix.data, g.matrix, loss, gradient_scale);
    Formulas<D, T>(*context_, stream, pass.rows()).norm_backward(w.norm, g.norm, x, scale, narrow, nullptr, dx);
  }

 private:
  Context<D, T> const* context_;
};

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

  /// A pass through all layers: LlamaForCausalLM.forward. Each layer is an fsdp::ShardedModule: its forward gathers the
  /// layer's parameters, calls the layer and reshards them; its backward also reduces the gradients over ranks.
  /// @param end  how the head ends the pass: Normalise in training, LossTarget in evaluation, or Sample
  template <class Model, class End>
  static void forward(Model& model, Pass const& pass, std::int32_t const* tokens, End const& end) {
    auto const& a = model.activations();
    model.embedding().forward(pass, tokens, a.embedded());
    for (std::int64_t layer = 0; layer < model.layers(); ++layer) model.block(layer).forward(pass, a.block(layer));
    model.head().forward(pass, a.final_rows(), a.final_norm(), end);
  }
  /// Backward of the loss, from the head down to the embedding. a.gradient() is that of the residual stream. Layers
  /// below the lowest that trains do nothing.
  /// @param gradient_scale  multiplies gradients, but not the loss
  template <class Model>
  static void backward(Model& model, Pass const& pass, std::int32_t const* tokens, LossTarget const& loss,
                       double gradient_scale) {
    auto const& a = model.activations();
    model.head().backward(pass, a.final_rows(), a.final_norm(), loss, gradient_scale, a.gradient());
    for (std::int64_t layer = model.layers(); layer-- > 0;) {
      model.recompute_segment(pass, layer);
      model.block(layer).backward(pass, a.block(layer), a.gradient());
    }
    model.embedding().backward(pass, tokens, a.gradient());
  }
};

/// A Llama on an engine E, which must outlive it. Its member functions are in Decoder. The embedding and the head are
/// one unit if they are tied, else each by itself; every block is a unit, or neighbouring blocks are, if the options
/// say so.
template <class E>
class Llama : public Decoder<E, LlamaLayers> {
 public:
  /// @param length  tokens of a sequence; of a text that is decoded: prompt and new tokens, for whose keys there is
  /// room
  Llama(E& engine, LlamaConfig const& config, std::int64_t batch, std::int64_t length,
        DecoderOptions const& options = {})
      : Decoder<E, LlamaLayers>(engine, config, batch, length, options) {
    auto const table = rope_table(config.rope_scaling, config.rope_theta, config.head_dim, length);
    auto const& device = engine.device();
    device.copy_async(engine.compute(), this->activations().workspace().rotations, table.data(),
                      table.size() * sizeof(float));
    device.synchronize(engine.compute());  // the table goes with this call
  }
};

}  // namespace llama
