// SPDX-License-Identifier: Apache-2.0
// A block of a Llama: x + attention(norm(x)), then x + mlp(norm(x)), without biases. Its matrices may have adapters.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "context.hpp"
#include "fsdp/layout.hpp"
#include "llama/linear_layers.hpp"
#include "transformer/attention/causal_attention.hpp"
#include "transformer/kernels/activation.hpp"
#include "transformer/kernels/rms_norm.hpp"
#include "transformer/kernels/rope.hpp"
#include "transformer/kernels/swiglu.hpp"
#include "transformer/layers/adapters.hpp"
#include "transformer/layers/joined_linear.hpp"
#include "transformer/layers/pass.hpp"
#include "transformer/math/gemm.hpp"

namespace llama {

/// One layer. T: element type of activations and parameters.
template <class D, class T>
class Block {
 public:
  using Stream = typename D::Stream;
  using Real = Compute<T>;
  using Gradient = fsdp::Gradient<Real>;
  static constexpr bool sets_gradients = true, skips_gradients = true;

  enum Linear : std::size_t { q, k, v, o, gate, up, down };
  static constexpr auto linear_layers = llama::linear_layers;

  /// C: hidden size, F: intermediate size, A = H Q: width of the queries, and K Q that of the keys.
  template <class E>
  struct Params {
    fsdp::Tensor<E, 1> norm_1, norm_2;   // (C)
    JoinedMatrices<E, 3> qkv;            // (A, C), (K Q, C), (K Q, C)
    fsdp::Tensor<E, 2> mix;              // (C, A)
    JoinedMatrices<E, 2> gate_up;        // (F, C), (F, C)
    fsdp::Tensor<E, 2> down;             // (C, F)
    std::array<Adapter<E>, 7> adapters;  // by Linear
  };

  Block(Context<D, T> const& context, std::int64_t layer)
      : context_(&context), attention_(context.attention), layer_(layer) {}

  template <class E, class Visit>
  void describe(Params<E>& p, Visit&& tensor) const {
    auto const& config = context_->config;
    auto const width = config.hidden_size, hidden = config.intermediate_size, size = config.head_dim;
    auto const queries = config.num_attention_heads * size, keys = config.num_key_value_heads * size;
    bool const is_frozen = !context_->tuning.trains(layer_, config.num_hidden_layers);
    fsdp::TensorOptions const ones{.decay = false, .init = fsdp::init::ones, .frozen = is_frozen};
    auto const matrix = [&](Linear layer, fsdp::Tensor<E, 2>& of, std::int64_t out, std::int64_t in) {
      tensor(std::string(linear_layers[layer]) + ".weight", of, {out, in}, fsdp::TensorOptions{.frozen = is_frozen});
    };
    tensor("input_layernorm.weight", p.norm_1, {width}, ones);
    matrix(q, p.qkv[0], queries, width);
    matrix(k, p.qkv[1], keys, width);
    matrix(v, p.qkv[2], keys, width);
    matrix(o, p.mix, width, queries);
    tensor("post_attention_layernorm.weight", p.norm_2, {width}, ones);
    matrix(gate, p.gate_up[0], hidden, width);
    matrix(up, p.gate_up[1], hidden, width);
    matrix(down, p.down, width, hidden);
    auto const adapter = [&](Linear layer, std::int64_t out, std::int64_t in) {
      describe_adapter(context_->tuning, p.adapters[layer], linear_layers[layer], out, in, tensor);
    };
    adapter(q, queries, width);
    adapter(k, keys, width);
    adapter(v, keys, width);
    adapter(o, width, queries);
    adapter(gate, hidden, width);
    adapter(up, hidden, width);
    adapter(down, width, hidden);
  }

  /// a.output = block of a.input, for the rows of `pass`; fills the rest of `a`.
  /// @note Stream: uses the workspace's wide, narrow and scores.
  /// @param part  everything, or what backward needs of a layer whose output is known
  void forward(Stream& stream, Params<T const> const& w, Pass const& pass, BlockActivations<T> const& a,
               Forward part = Forward::all) const;

  /// g += gradients of the parameters (fresh ones: =); `gradient` (B n, C) comes in as that of a.output and goes out as
  /// that of a.input.
  /// @pre forward of the same pass has filled `a`; a.gate_up and a.qkv are overwritten
  /// @note Stream: uses the workspace's wide, narrow, scores and partials.
  void backward(Stream& stream, Params<T const> const& w, Params<Gradient> const& g, Pass const& pass,
                BlockActivations<T> const& a, T* gradient) const;

 private:
  void normalise(Stream& stream, std::int64_t rows, T const* x, fsdp::Tensor<T const, 1> const& weight,
                 Real* scale) const {
    rms_norm_forward(context_->device, stream, x, weight.data, context_->workspace.narrow, scale, rows,
                     context_->config.hidden_size, context_->config.rms_norm_eps);
  }

  /// y (rows, stride) += the adapters' part of neighbouring layers, from `first` on, that read x.
  template <std::size_t N>
  void adapt(Stream& stream, std::int64_t rows, Params<T const> const& w, Linear first,
             JoinedMatrices<T const, N> const& matrices, T const* x, T* y) const {
    auto const stride = joined_outputs(matrices);
    for (std::size_t i = 0; i < N; ++i) {
      context_->adapters.forward(stream, rows, w.adapters[first + i], x, y, stride);
      y += matrices[i].extents[0];
    }
  }

  /// Backward of neighbouring layers, from `first` on, behind a norm: their results' gradient dy (rows, all outputs)
  /// adds to that of x (rows, C), the rows before the norm. The normalised rows are computed again.
  template <std::size_t N>
  void backward_to_norm(Stream& stream, std::int64_t rows, Params<T const> const& w, Params<Gradient> const& g,
                        Linear first, JoinedMatrices<T const, N> const& matrices,
                        JoinedMatrices<Gradient, N> const& gradients, T const* dy, T const* x,
                        fsdp::Tensor<T const, 1> const& norm, fsdp::Tensor<Gradient, 1> const& norm_gradient,
                        Real* scale, T* gradient) const;

  Context<D, T> const* context_;
  CausalAttention<D, T> attention_;
  std::int64_t layer_;
};

template <class D, class T>
void Block<D, T>::forward(Stream& stream, Params<T const> const& w, Pass const& pass, BlockActivations<T> const& a,
                          Forward part) const {
  auto const& config = context_->config;
  auto const& work = context_->workspace;
  auto const& device = context_->device;
  auto& gemm = *context_->gemm;
  auto const rows = pass.rows(), width = config.hidden_size;
  auto const heads = config.heads();

  normalise(stream, rows, a.input, w.norm_1, a.scale_1);
  joined_linear(gemm, stream, rows, static_cast<T const*>(work.narrow), w.qkv, work.wide);
  adapt(stream, rows, w, q, w.qkv, work.narrow, work.wide);
  rope_forward(device, stream, heads, pass, static_cast<T const*>(work.wide), work.rotations, a.qkv);
  attention_.forward(stream, pass, {}, a.qkv, a.mixed, a.log_sums);
  linear(gemm, stream, rows, heads.width(), width, static_cast<T const*>(a.mixed), w.mix.data, work.narrow, width);
  context_->adapters.forward(stream, rows, w.adapters[o], a.mixed, work.narrow, width);

  residual_rms_norm_forward(device, stream, static_cast<T const*>(a.input), static_cast<T const*>(work.narrow),
                            a.middle, w.norm_2.data, work.narrow, a.scale_2, rows, width, config.rms_norm_eps);
  joined_linear(gemm, stream, rows, static_cast<T const*>(work.narrow), w.gate_up, a.gate_up);
  adapt(stream, rows, w, gate, w.gate_up, work.narrow, a.gate_up);
  if (part == Forward::without_output) return;
  swiglu_forward(device, stream, static_cast<T const*>(a.gate_up), work.wide, rows, config.intermediate_size);
  linear(gemm, stream, rows, config.intermediate_size, width, static_cast<T const*>(work.wide), w.down.data,
         work.narrow, width);
  context_->adapters.forward(stream, rows, w.adapters[down], work.wide, work.narrow, width);
  bias_residual_forward(device, stream, static_cast<T const*>(a.middle), static_cast<T const*>(work.narrow),
                        static_cast<T const*>(nullptr), a.output, rows, width);
}

template <class D, class T>
void Block<D, T>::backward(Stream& stream, Params<T const> const& w, Params<Gradient> const& g, Pass const& pass,
                           BlockActivations<T> const& a, T* gradient) const {
  auto const& config = context_->config;
  auto const& work = context_->workspace;
  auto const& device = context_->device;
  auto const& adapters = context_->adapters;
  auto& gemm = *context_->gemm;
  auto const rows = pass.rows(), width = config.hidden_size, hidden = config.intermediate_size;
  auto const heads = config.heads();
  T const* const dy = gradient;
  if (context_->plan.segment == 1 && context_->plan.recomputes(layer_))
    forward(stream, w, pass, a, Forward::without_output);

  // MLP. work.wide becomes SwiGLU's result as its derivative is taken.
  linear_input_gradient(gemm, stream, rows, hidden, width, dy, width, w.down.data, work.wide);
  adapters.low_gradient(stream, rows, w.adapters[down], dy, width);
  adapters.input_gradient(stream, rows, w.adapters[down], work.wide);
  swiglu_backward(device, stream, a.gate_up, work.wide, rows, hidden);
  linear_weight_gradient(gemm, stream, rows, hidden, width, static_cast<T const*>(work.wide), dy, width, g.down.data,
                         g.down.fresh);
  adapters.weight_gradients(stream, rows, w.adapters[down], g.adapters[down], work.wide, dy, width);
  backward_to_norm(stream, rows, w, g, gate, w.gate_up, g.gate_up, a.gate_up, a.middle, w.norm_2, g.norm_2, a.scale_2,
                   gradient);

  // Attention. a.qkv becomes the gradient of the projected queries, keys and values.
  linear_weight_gradient(gemm, stream, rows, heads.width(), width, static_cast<T const*>(a.mixed), dy, width,
                         g.mix.data, g.mix.fresh);
  linear_input_gradient(gemm, stream, rows, heads.width(), width, dy, width, w.mix.data, work.narrow);
  adapters.low_gradient(stream, rows, w.adapters[o], dy, width);
  adapters.input_gradient(stream, rows, w.adapters[o], work.narrow);
  adapters.weight_gradients(stream, rows, w.adapters[o], g.adapters[o], a.mixed, dy, width);
  attention_.backward(stream, pass, {}, a.qkv, a.mixed, a.log_sums, work.narrow, work.wide);
  rope_backward(device, stream, heads, pass, static_cast<T const*>(work.wide), work.rotations, a.qkv);
  backward_to_norm(stream, rows, w, g, q, w.qkv, g.qkv, a.qkv, a.input, w.norm_1, g.norm_1, a.scale_1, gradient);
}

template <class D, class T>
template <std::size_t N>
void Block<D, T>::backward_to_norm(Stream& stream, std::int64_t rows, Params<T const> const& w,
                                   Params<Gradient> const& g, Linear first, JoinedMatrices<T const, N> const& matrices,
                                   JoinedMatrices<Gradient, N> const& gradients, T const* dy, T const* x,
                                   fsdp::Tensor<T const, 1> const& norm, fsdp::Tensor<Gradient, 1> const& norm_gradient,
                                   Real* scale, T* gradient) const {
  auto const& work = context_->workspace;
  auto const& adapters = context_->adapters;
  auto& gemm = *context_->gemm;
  T const* const normal = work.narrow;
  bool wanted = gradients[0].wanted();
  for (std::size_t i = 0; i < N; ++i) wanted = wanted || g.adapters[first + i].a.wanted();
  if (wanted) normalise(stream, rows, x, norm, scale);
  joined_weight_gradient(gemm, stream, rows, normal, dy, gradients);
  joined_input_gradient(gemm, stream, rows, dy, matrices, work.wide);
  auto const stride = joined_outputs(matrices);
  for (std::size_t i = 0; i < N; ++i) {
    auto const& adapter = w.adapters[first + i];
    adapters.low_gradient(stream, rows, adapter, dy, stride);
    adapters.weight_gradients(stream, rows, adapter, g.adapters[first + i], normal, dy, stride);
    adapters.input_gradient(stream, rows, adapter, work.wide);
    dy += matrices[i].extents[0];
  }
  rms_norm_backward(context_->device, stream, static_cast<T const*>(work.wide), x, norm.data, scale,
                    static_cast<T const*>(gradient), gradient, norm_gradient.data, rows, context_->config.hidden_size,
                    work.partials, norm_gradient.fresh);
}

}  // namespace llama
