// SPDX-License-Identifier: Apache-2.0
// The GPT of nanoGPT's model.py: embedding, blocks and head, each with its forward and its backward.
//
// B: sequences of a pass, n: tokens of a sequence, C: n_embd, V: vocab_size. A matrix W (out, in) is stored as
// nn.Linear stores it. T is the element type of parameters and activations; gradients of parameters are Compute<T>. A
// gradient is fresh until the first backward after a step has written it: kernels assign it first, then add to it.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "fsdp/layout.hpp"
#include "nanogpt/activations.hpp"
#include "nanogpt/gpt_config.hpp"
#include "transformer/attention/causal_attention.hpp"
#include "transformer/kernels/row_kernels.hpp"
#include "transformer/layers/classifier.hpp"
#include "transformer/layers/context.hpp"
#include "transformer/layers/decoder.hpp"
#include "transformer/layers/linear.hpp"
#include "transformer/layers/pass.hpp"

namespace nanogpt {

/// The configuration, the matrix products and the scratch buffers that all layers share.
template <class D, class T>
using Context = LayerContext<D, T, GptConfig, Workspace<T>>;

/// The tensors of a LayerNorm, or their gradients.
template <class E>
struct Norm {
  fsdp::Tensor<E, 1> weight;  // (C)
  fsdp::Tensor<E, 1> bias;    // (C); without data in models without biases
};

/// The formulas of a GPT, for the rows (B n) of one pass. Every function enqueues kernels on the pass's stream.
/// The linear functions of LinearPass also compute the layer's adapter (LoRA), if it has one.
template <class D, class T>
class Formulas : public LinearPass<D, T> {
  using Base = LinearPass<D, T>;
  using Base::device, Base::stream, Base::rows, Base::partials;

 public:
  using Gradient = typename Base::Gradient;
  using Statistics = NormStatistics<Compute<T>>;

  /// @param first_row  number of the first row in the step's batch: it selects the dropout mask
  Formulas(Context<D, T> const& context, typename D::Stream& on, std::int64_t row_count, std::int64_t first_row = 0)
      : Base{context.device, on, *context.gemm, context.adapters, context.workspace.partials, row_count},
        config_(context.config),
        first_row_(first_row) {}

  /// y = norm(x), and the statistics of x, which backward needs.
  void norm(Norm<T const> const& w, T const* x, Statistics const& statistics, T* y) const {
    layer_norm_forward(device, stream, x, w.weight.data, w.bias.data, y, statistics.mean, statistics.scale, rows,
                       config_.n_embd);
  }
  /// dx = skip + the gradient that dy, of y = norm(x), gives x; adds to the gradients of weight and bias.
  /// @param skip  (B n, C): gradient that reaches x past the norm, or null for 0; may be dx
  void norm_backward(Norm<T const> const& w, Norm<Gradient> const& g, T const* x, Statistics const& statistics,
                     T const* dy, T const* skip, T* dx) const {
    layer_norm_backward(device, stream, dy, x, w.weight.data, statistics.mean, statistics.scale, skip, dx,
                        g.weight.data, g.bias.data, rows, config_.n_embd, partials, g.weight.fresh);
  }

  /// hidden (B n, 4C) += bias; y = gelu(hidden).
  void add_bias_and_gelu(Linear<T const> const& w, T* hidden, T* y) const {
    with_gelu([&](auto formula) {
      bias_gelu_forward<decltype(formula)>(device, stream, hidden, w.bias.data, y, rows, 4 * config_.n_embd);
    });
  }
  /// gradient (B n, 4C) becomes that of hidden. hidden becomes gelu(hidden), for the gradient of mlp_proj's weight.
  void gelu_backward(T* hidden, T* gradient) const {
    with_gelu([&](auto formula) {
      transformer::gelu_backward<decltype(formula)>(device, stream, hidden, gradient, rows * 4 * config_.n_embd);
    });
  }

  /// y = x + dropout(branch + bias of w). The contents of `branch` are undefined afterwards.
  void add_branch(T const* x, Linear<T const> const& w, T* branch, DropoutMask const& mask, T* y) const {
    T const* bias = w.bias.data;
    if (mask.probability > 0.0f) {
      this->add_bias(w, branch);
      drop(branch, config_.n_embd, mask, branch);
      bias = nullptr;
    }
    bias_residual_forward(device, stream, x, static_cast<T const*>(branch), bias, y, rows, config_.n_embd);
  }
  /// y = x + dropout(branch + bias of w), then branch = norm(y): one kernel where nothing is dropped.
  void add_branch_and_norm(T const* x, Linear<T const> const& w, DropoutMask const& mask, T* y, Norm<T const> const& of,
                           Statistics const& statistics, T* branch) const {
    if (mask.probability > 0.0f) {
      add_branch(x, w, branch, mask, y);
      return norm(of, y, statistics, branch);
    }
    residual_layer_norm_forward(device, stream, x, static_cast<T const*>(branch), w.bias.data, y, of.weight.data,
                                of.bias.data, branch, statistics.mean, statistics.scale, rows, config_.n_embd);
  }
  /// The gradient of a branch, given that of y: dy itself, or, where something is dropped, scratch (B n, C).
  T const* branch_gradient(T const* dy, DropoutMask const& mask, T* scratch) const {
    if (mask.probability == 0.0f) return dy;
    drop(dy, config_.n_embd, mask, scratch);
    return scratch;
  }

  /// y (B n, columns) = dropout(x), and likewise of a gradient in backward. @pre y is x if nothing is dropped
  void drop(T const* x, std::int64_t columns, DropoutMask const& mask, T* y) const {
    if (mask.probability > 0.0f) dropout(device, stream, x, y, rows * columns, mask, first_row_ * columns);
  }

 private:
  /// Calls use(formula) with the model's GELU. Each kernel is compiled for one formula.
  template <class Use>
  void with_gelu(Use const& use) const {
    if (config_.activation == Activation::gelu_new) return use(TanhGelu{});
    use(ExactGelu{});
  }

  GptConfig const& config_;
  std::int64_t first_row_;
};

/// Rows of wte by token plus rows of wpe by position. wte is also the head's matrix: both layers are in the root unit,
/// whose parameters are gathered together.
template <class D, class T>
class Embedding {
 public:
  using Stream = typename D::Stream;
  using Gradient = fsdp::Gradient<Compute<T>>;
  // Backward assigns fresh gradients, so that the engine zeroes none, and leaves out those that are not wanted.
  static constexpr bool sets_gradients = true, skips_gradients = true;

  template <class E>
  struct Params {
    fsdp::Tensor<E, 2> tokens;     // (V, C)
    fsdp::Tensor<E, 2> positions;  // (block_size, C)
  };

  explicit Embedding(Context<D, T> const& context) : context_(&context) {}

  template <class E, class Visit>
  void describe(Params<E>& p, Visit&& tensor) const {
    auto const& config = context_->config;
    fsdp::TensorOptions const options{.frozen = !context_->tuning.trains_embeddings()};
    tensor("wte.weight", p.tokens, {config.vocab_size, config.n_embd}, options);
    tensor("wpe.weight", p.positions, {config.block_size, config.n_embd}, options);
  }

  /// x (B, n, C) = dropout(row of the token + row of the position).
  /// @param tokens  (B, n), in [0, V)
  void forward(Stream& stream, Params<T const> const& w, Pass const& pass, std::int32_t const* tokens, T* x) const;

  /// Adds dx (B, n, C), which is overwritten, to the gradients of both tables. A table has rows that no token or
  /// position names, so a fresh gradient is zeroed first. wte's is fresh only if the head's backward has left it out.
  /// @pre pass.position == 0
  void backward(Stream& stream, Params<T const> const&, Params<Gradient> const& g, Pass const& pass,
                std::int32_t const* tokens, T* dx) const;

 private:
  void zero(Stream& stream, fsdp::Tensor<Gradient, 2> const& table) const {
    context_->device.zero_async(stream, table.data, static_cast<std::size_t>(table.numel()) * sizeof *table.data);
  }

  Context<D, T> const* context_;
};

template <class D, class T>
void Embedding<D, T>::forward(Stream& stream, Params<T const> const& w, Pass const& pass, std::int32_t const* tokens,
                              T* x) const {
  embedding_forward(context_->device, stream, tokens, w.tokens.data, w.positions.data, x, pass.batch, pass.length,
                    context_->config.n_embd, pass.position);
  Formulas<D, T>(*context_, stream, pass.rows(), pass.first_row())
      .drop(x, context_->config.n_embd, pass.mask_of_embedding(), x);
}

template <class D, class T>
void Embedding<D, T>::backward(Stream& stream, Params<T const> const&, Params<Gradient> const& g, Pass const& pass,
                               std::int32_t const* tokens, T* dx) const {
  if (!g.tokens.wanted()) return;
  Formulas<D, T>(*context_, stream, pass.rows(), pass.first_row())
      .drop(dx, context_->config.n_embd, pass.mask_of_embedding(), dx);
  if (g.tokens.fresh) zero(stream, g.tokens);
  if (g.positions.fresh) zero(stream, g.positions);
  embedding_backward(context_->device, stream, tokens, static_cast<T const*>(dx), g.tokens.data, g.positions.data,
                     pass.batch, pass.length, context_->config.n_embd);
}

/// A transformer block: x + attention(ln_1(x)), then x + mlp(ln_2(x)).
template <class D, class T>
class Block {
 public:
  using Stream = typename D::Stream;
  using Gradient = fsdp::Gradient<Compute<T>>;
  static constexpr bool sets_gradients = true, skips_gradients = true;
  static constexpr std::array<std::string_view, 4> linear_layers{"attn.c_attn", "attn.c_proj", "mlp.c_fc",
                                                                 "mlp.c_proj"};

  template <class E>
  struct Params {
    Norm<E> ln_1;
    Linear<E> qkv;        // (3C, C)
    Linear<E> attn_proj;  // (C, C)
    Norm<E> ln_2;
    Linear<E> fc;        // (4C, C)
    Linear<E> mlp_proj;  // (C, 4C)
  };

  Block(Context<D, T> const& context, std::int64_t layer)
      : context_(&context), attention_(context.attention), layer_(layer) {}

  template <class E, class Visit>
  void describe(Params<E>& p, Visit&& tensor) const {
    auto const& config = context_->config;
    auto const width = config.n_embd;
    bool const frozen = !context_->tuning.trains(layer_, config.n_layer);
    // By default a tensor starts as normal(0, 0.02) and decays. Projections onto the residual stream start smaller, so
    // that the sum over all layers keeps its variance (Radford et al., 2019).
    auto const small = fsdp::init::normal(0.02f / std::sqrt(2.0f * static_cast<float>(config.n_layer)));
    fsdp::TensorOptions const matrix{.frozen = frozen}, projection{.init = small, .frozen = frozen};
    fsdp::TensorOptions const ones{.decay = false, .init = fsdp::init::ones, .frozen = frozen};
    fsdp::TensorOptions const zeros{.decay = false, .init = fsdp::init::zeros, .frozen = frozen};
    auto const norm = [&](std::string const& name, Norm<E>& of) {
      tensor(name + ".weight", of.weight, {width}, ones);
      if (config.bias) tensor(name + ".bias", of.bias, {width}, zeros);
    };
    auto const linear = [&](std::size_t which, Linear<E>& of, std::int64_t out, std::int64_t in, auto const& options) {
      std::string const name(linear_layers[which]);
      tensor(name + ".weight", of.weight, {out, in}, options);
      if (config.bias) tensor(name + ".bias", of.bias, {out}, zeros);
    };
    norm("ln_1", p.ln_1);
    linear(0, p.qkv, 3 * width, width, matrix);
    linear(1, p.attn_proj, width, width, projection);
    norm("ln_2", p.ln_2);
    linear(2, p.fc, 4 * width, width, matrix);
    linear(3, p.mlp_proj, width, 4 * width, projection);
    auto const adapter = [&](std::size_t which, Linear<E>& of, std::int64_t out, std::int64_t in) {
      describe_adapter(context_->tuning, of.adapter, linear_layers[which], out, in, tensor);
    };
    adapter(0, p.qkv, 3 * width, width);
    adapter(1, p.attn_proj, width, width);
    adapter(2, p.fc, 4 * width, width);
    adapter(3, p.mlp_proj, width, 4 * width);
  }

  /// a.output = block of a.input; fills the rest of `a`. Overwrites the workspace's wide, narrow and scores.
  /// @param part  Forward::without_output computes only what backward needs, and leaves a.output alone
  /// @pre B is 1 if pass.position > 0, that is, if earlier tokens are kept
  void forward(Stream& stream, Params<T const> const& w, Pass const& pass, BlockActivations<T> const& a,
               Forward part = Forward::all) const;

  /// Adds to the gradients of the parameters. `gradient` (B n, C) comes in as that of a.output and goes out as that of
  /// a.input. Overwrites a.hidden, and the workspace's wide, narrow, narrow_2, scores and partials.
  /// @pre forward of the same pass has filled `a`, or a.input alone if the block is recomputed
  void backward(Stream& stream, Params<T const> const& w, Params<Gradient> const& g, Pass const& pass,
                BlockActivations<T> const& a, T* gradient) const;

 private:
  enum DropoutSite : std::uint32_t { in_attention, after_attention, after_mlp };

  Context<D, T> const* context_;
  CausalAttention<D, T> attention_;
  std::int64_t layer_;
};

// Steps: 1 ln_1, 2 qkv, 3 attention, 4 attn_proj and residual, 5 ln_2, 6 fc, 7 GELU, 8 mlp_proj and residual. A comment
// in forward names the result, one in backward the value whose gradient is computed. `narrow` and `wide` are scratch
// that all blocks share: their contents are lost after forward, and backward computes 1, 5 and 7 again.
template <class D, class T>
void Block<D, T>::forward(Stream& stream, Params<T const> const& w, Pass const& pass, BlockActivations<T> const& a,
                          Forward part) const {
  Formulas<D, T> const f(*context_, stream, pass.rows(), pass.first_row());
  auto const mask = [&](DropoutSite site) { return pass.mask_at(layer_, site); };
  T *const narrow = context_->workspace.narrow, *const wide = context_->workspace.wide;
  T* const qkv = a.qkv + pass.position * 3 * context_->config.n_embd;  // decoding: behind the rows of earlier tokens

  f.norm(w.ln_1, a.input, a.ln_1_statistics, narrow);                                           // 1: narrow (B n, C)
  f.linear(w.qkv, narrow, qkv);                                                                 // 2: a.qkv (B n, 3C)
  attention_.forward(stream, pass, mask(in_attention), a.qkv, a.attention_output, a.log_sums);  // 3: (B n, C)
  f.linear_without_bias(w.attn_proj, a.attention_output, narrow);                               // 4: narrow (B n, C)
  f.add_branch_and_norm(a.input, w.attn_proj, mask(after_attention), a.residual,  // 4: a.residual (B n, C)
                        w.ln_2, a.ln_2_statistics, narrow);                       // 5: narrow (B n, C)
  f.linear_without_bias(w.fc, narrow, a.hidden);                                  // 6: a.hidden (B n, 4C)
  if (part == Forward::without_output) return f.add_bias(w.fc, a.hidden);
  f.add_bias_and_gelu(w.fc, a.hidden, wide);                                // 7: wide (B n, 4C)
  f.linear_without_bias(w.mlp_proj, wide, narrow);                          // 8: narrow (B n, C)
  f.add_branch(a.residual, w.mlp_proj, narrow, mask(after_mlp), a.output);  // 8: a.output (B n, C)
}

template <class D, class T>
void Block<D, T>::backward(Stream& stream, Params<T const> const& w, Params<Gradient> const& g, Pass const& pass,
                           BlockActivations<T> const& a, T* gradient) const {
  Formulas<D, T> const f(*context_, stream, pass.rows(), pass.first_row());
  auto const mask = [&](DropoutSite site) { return pass.mask_at(layer_, site); };
  auto const& work = context_->workspace;
  T *const narrow = work.narrow, *const wide = work.wide;
  // A block that is recomputed alone fills `a` again here; Decoder::recompute_segment does so for several.
  if (context_->plan.segment == 1 && context_->plan.recomputes(layer_))
    forward(stream, w, pass, a, Forward::without_output);

  T const* dy = f.branch_gradient(gradient, mask(after_mlp), work.narrow_2);  // 8: mlp_proj's result
  f.linear_input_gradient(w.mlp_proj, dy, wide);                              // 8: GELU's result
  f.gelu_backward(a.hidden, wide);                                     // 7: fc's result; a.hidden = GELU's result
  f.linear_parameter_gradients(w.mlp_proj, g.mlp_proj, a.hidden, dy);  // 8: weight and bias, from GELU's result
  if (g.fc.wants_input()) f.norm(w.ln_2, a.residual, a.ln_2_statistics, narrow);  // ln_2's result again
  f.linear_backward(w.fc, g.fc, narrow, wide, narrow);                            // 6: weight, bias, ln_2's result
  f.norm_backward(w.ln_2, g.ln_2, a.residual, a.ln_2_statistics, narrow, gradient, gradient);  // 5 and 4: a.residual

  dy = f.branch_gradient(gradient, mask(after_attention), work.narrow_2);       // 4: attn_proj's result
  f.linear_backward(w.attn_proj, g.attn_proj, a.attention_output, dy, narrow);  // 4: weight, bias, attention_output
  attention_.backward(stream, pass, mask(in_attention), a.qkv, a.attention_output, a.log_sums, narrow, wide);  // 3: qkv
  if (g.qkv.wants_input()) f.norm(w.ln_1, a.input, a.ln_1_statistics, narrow);  // ln_1's result again
  f.linear_backward(w.qkv, g.qkv, narrow, wide, narrow);                        // 2: weight, bias, ln_1's result
  f.norm_backward(w.ln_1, g.ln_1, a.input, a.ln_1_statistics, narrow, gradient, gradient);  // 1: a.input
}

/// The last LayerNorm and the classifier, whose matrix is the embedding's wte: both layers describe the same tensor.
template <class D, class T>
class Head {
 public:
  using Stream = typename D::Stream;
  using Gradient = fsdp::Gradient<Compute<T>>;
  using Statistics = NormStatistics<Compute<T>>;
  static constexpr bool sets_gradients = true, skips_gradients = true;

  template <class E>
  struct Params {
    Norm<E> ln_f;
    fsdp::Tensor<E, 2> tokens;  // (V, C)
  };

  explicit Head(Context<D, T> const& context) : context_(&context) {}

  template <class E, class Visit>
  void describe(Params<E>& p, Visit&& tensor) const {
    auto const& config = context_->config;
    auto const& tuning = context_->tuning;
    fsdp::TensorOptions const ones{.decay = false, .init = fsdp::init::ones, .frozen = tuning.adapts()};
    fsdp::TensorOptions const zeros{.decay = false, .init = fsdp::init::zeros, .frozen = tuning.adapts()};
    tensor("ln_f.weight", p.ln_f.weight, {config.n_embd}, ones);
    if (config.bias) tensor("ln_f.bias", p.ln_f.bias, {config.n_embd}, zeros);
    tensor("wte.weight", p.tokens, {config.vocab_size, config.n_embd},
           fsdp::TensorOptions{.frozen = !tuning.trains_head(/*tied=*/true)});
  }

  /// Training: normalises x (B n, C) into the workspace's narrow, where backward finds it. Logits and loss are computed
  /// in backward: [Note: Logits in parts] in classifier.hpp.
  void forward(Stream& stream, Params<T const> const& w, Pass const& pass, T const* x, Statistics const& norm,
               Normalise) const {
    Formulas<D, T>(*context_, stream, pass.rows()).norm(w.ln_f, x, norm, context_->workspace.narrow);
  }
  /// Evaluation: adds the mean cross-entropy.
  void forward(Stream& stream, Params<T const> const& w, Pass const& pass, T const* x, Statistics const& norm,
               LossTarget const& to) const {
    forward(stream, w, pass, x, norm, Normalise{});
    context_->classifier.evaluate(stream, pass, context_->workspace.narrow, w.tokens.data, to);
  }
  /// Decoding: logits of the last row.
  void forward(Stream& stream, Params<T const> const& w, Pass const& pass, T const* x, Statistics const&,
               Sample<T> const& to) const {
    T* const narrow = context_->workspace.narrow;
    T const* const last = x + (pass.rows() - 1) * context_->config.n_embd;
    Formulas<D, T>(*context_, stream, 1).norm(w.ln_f, last, {}, narrow);
    context_->classifier.sample(stream, narrow, w.tokens.data, to.logits);
  }

  /// *loss.loss += loss.weight * mean cross-entropy. Its gradients times gradient_scale are added to g, and are dx.
  /// @pre forward(..., Normalise) of the same pass, and nothing since that uses the workspace
  void backward(Stream& stream, Params<T const> const& w, Params<Gradient> const& g, Pass const& pass, T const* x,
                Statistics const& norm, LossTarget const& loss, double gradient_scale, T* dx) const {
    T* const narrow = context_->workspace.narrow;
    context_->classifier.backward(stream, pass, narrow, w.tokens.data, g.tokens, loss, gradient_scale);
    Formulas<D, T>(*context_, stream, pass.rows()).norm_backward(w.ln_f, g.ln_f, x, norm, narrow, nullptr, dx);
  }

 private:
  Context<D, T> const* context_;
};

/// The layers of a GPT, their tensors' names (transformer.wte, transformer.h.0.attn.c_attn, transformer.ln_f), and the
/// order in which they run.
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

  /// A pass through all layers: GPT.forward of nanoGPT. Each layer is an fsdp::ShardedModule: its forward gathers the
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

/// A GPT on an engine E, which must outlive it. Its member functions are in Decoder. The embedding and the head are one
/// unit, because wte is tied; every block is a unit, or neighbouring blocks are, if the options say so.
template <class E>
class Gpt : public Decoder<E, GptLayers> {
 public:
  Gpt(E& engine, GptConfig const& config, std::int64_t batch, std::int64_t length, DecoderOptions const& options = {})
      : Decoder<E, GptLayers>(engine, config, batch, length, options) {}
};

}  // namespace nanogpt
