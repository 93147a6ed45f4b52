// SPDX-License-Identifier: Apache-2.0
// A transformer block: x + attention(norm(x)), then x + mlp(norm(x)). Its matrices may have adapters.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <string_view>

#include "context.hpp"
#include "fsdp/layout.hpp"
#include "transformer/attention/causal_attention.hpp"
#include "transformer/kernels/row_kernels.hpp"
#include "transformer/layers/adapters.hpp"
#include "transformer/layers/pass.hpp"
#include "transformer/math/gemm.hpp"

namespace nanogpt {

/// One layer. T: element type of activations and parameters.
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
    fsdp::Tensor<E, 1> norm_1_weight, norm_1_bias;  // (C)
    fsdp::Tensor<E, 2> qkv_weight;                  // (3C, C)
    fsdp::Tensor<E, 1> qkv_bias;                    // (3C)
    fsdp::Tensor<E, 2> mix_weight;                  // (C, C)
    fsdp::Tensor<E, 1> mix_bias;                    // (C)
    fsdp::Tensor<E, 1> norm_2_weight, norm_2_bias;  // (C)
    fsdp::Tensor<E, 2> up_weight;                   // (4C, C)
    fsdp::Tensor<E, 1> up_bias;                     // (4C)
    fsdp::Tensor<E, 2> down_weight;                 // (C, 4C)
    fsdp::Tensor<E, 1> down_bias;                   // (C)
    Adapter<E> qkv, mix, up, down;
  };

  Block(Context<D, T> const& context, std::int64_t layer)
      : context_(&context), attention_(context.attention), layer_(layer) {}

  template <class E, class Visit>
  void describe(Params<E>& p, Visit&& tensor) const {
    auto const width = context_->config.n_embd;
    bool const bias = context_->config.bias;
    // Residual projections start smaller, so that the sum over all layers keeps its variance (Radford et al., 2019).
    bool const is_frozen = !context_->tuning.trains(layer_, context_->config.n_layer);
    auto const residual_init =
        fsdp::init::normal(0.02f / std::sqrt(2.0f * static_cast<float>(context_->config.n_layer)));
    fsdp::TensorOptions const matrix{.frozen = is_frozen}, residual{.init = residual_init, .frozen = is_frozen};
    fsdp::TensorOptions const ones{.decay = false, .init = fsdp::init::ones, .frozen = is_frozen};
    fsdp::TensorOptions const zeros{.decay = false, .init = fsdp::init::zeros, .frozen = is_frozen};
    tensor("ln_1.weight", p.norm_1_weight, {width}, ones);
    if (bias) tensor("ln_1.bias", p.norm_1_bias, {width}, zeros);
    tensor("attn.c_attn.weight", p.qkv_weight, {3 * width, width}, matrix);
    if (bias) tensor("attn.c_attn.bias", p.qkv_bias, {3 * width}, zeros);
    tensor("attn.c_proj.weight", p.mix_weight, {width, width}, residual);
    if (bias) tensor("attn.c_proj.bias", p.mix_bias, {width}, zeros);
    tensor("ln_2.weight", p.norm_2_weight, {width}, ones);
    if (bias) tensor("ln_2.bias", p.norm_2_bias, {width}, zeros);
    tensor("mlp.c_fc.weight", p.up_weight, {4 * width, width}, matrix);
    if (bias) tensor("mlp.c_fc.bias", p.up_bias, {4 * width}, zeros);
    tensor("mlp.c_proj.weight", p.down_weight, {width, 4 * width}, residual);
    if (bias) tensor("mlp.c_proj.bias", p.down_bias, {width}, zeros);
    auto const& tuning = context_->tuning;
    describe_adapter(tuning, p.qkv, linear_layers[0], 3 * width, width, tensor);
    describe_adapter(tuning, p.mix, linear_layers[1], width, width, tensor);
    describe_adapter(tuning, p.up, linear_layers[2], 4 * width, width, tensor);
    describe_adapter(tuning, p.down, linear_layers[3], width, 4 * width, tensor);
  }

  /// a.output = block of a.input, for the rows of `pass`; fills the rest of `a`.
  /// @note Stream: uses the workspace's wide, narrow and scores.
  /// @param part  everything, or what backward needs of a layer whose output is known
  void forward(Stream& stream, Params<T const> const& w, Pass const& pass, BlockActivations<T> const& a,
               Forward part = Forward::all) const;

  /// g += gradients of the parameters (fresh ones: =); `gradient` (B n, C) comes in as that of a.output and goes out as
  /// that of a.input.
  /// @pre forward of the same pass has filled `a` and the biases are in a.hidden; a.hidden is overwritten
  /// @note Stream: uses the workspace's wide, narrow, narrow_2, scores and partials.
  void backward(Stream& stream, Params<T const> const& w, Params<Gradient> const& g, Pass const& pass,
                BlockActivations<T> const& a, T* gradient) const;

 private:
  enum Place : std::uint32_t { attention_mask, mix_mask, mlp_mask };  // where a layer drops

  void until_hidden(Stream& stream, Params<T const> const& w, Pass const& pass, BlockActivations<T> const& a) const {
    auto const& work = context_->workspace;
    auto const& device = context_->device;
    auto& gemm = *context_->gemm;
    auto const rows = pass.rows(), width = context_->config.n_embd;
    T* const qkv = a.qkv + pass.position * 3 * width;
    layer_norm_forward(device, stream, static_cast<T const*>(a.input), w.norm_1_weight.data, w.norm_1_bias.data,
                       work.narrow, a.norm_1.mean, a.norm_1.scale, rows, width);
    linear_with_bias(stream, rows, width, 3 * width, work.narrow, w.qkv_weight.data, w.qkv_bias.data, qkv);
    context_->adapters.forward(stream, rows, w.qkv, work.narrow, qkv, 3 * width);
    attention_.forward(stream, pass, pass.mask_at(layer_, attention_mask), a.qkv, a.mixed, a.log_sums);
    linear(gemm, stream, rows, width, width, a.mixed, w.mix_weight.data, work.narrow, width);
    context_->adapters.forward(stream, rows, w.mix, a.mixed, work.narrow, width);
    if (pass.mask.probability > 0.0f) {
      add_residual(stream, pass, mix_mask, a.input, w.mix_bias.data, a.middle);
      layer_norm_forward(device, stream, static_cast<T const*>(a.middle), w.norm_2_weight.data, w.norm_2_bias.data,
                         work.narrow, a.norm_2.mean, a.norm_2.scale, rows, width);
    } else {
      residual_layer_norm_forward(device, stream, static_cast<T const*>(a.input), static_cast<T const*>(work.narrow),
                                  w.mix_bias.data, a.middle, w.norm_2_weight.data, w.norm_2_bias.data, work.narrow,
                                  a.norm_2.mean, a.norm_2.scale, rows, width);
    }
    linear(gemm, stream, rows, width, 4 * width, work.narrow, w.up_weight.data, a.hidden, 4 * width);
    context_->adapters.forward(stream, rows, w.up, work.narrow, a.hidden, 4 * width);
  }

  /// y (rows, out) = x (rows, in) W^T + bias; in one product where the device's Gemm adds biases.
  void linear_with_bias(Stream& stream, std::int64_t rows, std::int64_t in, std::int64_t out, T const* x,
                        T const* weight, T const* bias, T* y) const {
    auto& gemm = *context_->gemm;
    if constexpr (Gemm<D>::adds_bias) {
      if (bias != nullptr)
        return gemm.run_with_bias(stream, Op::none, Op::transpose, rows, out, in, 1, x, in, weight, in, bias, y, out);
    }
    linear(gemm, stream, rows, in, out, x, weight, y, out);
    bias_add(context_->device, stream, y, bias, rows, out);
  }

  /// use(formula) with the MLP's GELU: chosen here, once a launch, and compiled into the kernels.
  template <class Use>
  void with_formula(Use const& use) const {
    if (context_->config.activation == Activation::gelu_new) return use(TanhGelu{});
    use(ExactGelu{});
  }

  /// out = residual + dropout(narrow + bias).
  void add_residual(Stream& stream, Pass const& pass, Place place, T const* residual, T const* bias, T* out) const {
    auto const& device = context_->device;
    T* const branch = context_->workspace.narrow;
    auto const rows = pass.rows(), width = context_->config.n_embd;
    if (pass.mask.probability > 0.0f) {
      bias_add(device, stream, branch, bias, rows, width);
      dropout(device, stream, static_cast<T const*>(branch), branch, rows * width, pass.mask_at(layer_, place),
              pass.first_row() * width);
      bias = nullptr;
    }
    bias_residual_forward(device, stream, residual, static_cast<T const*>(branch), bias, out, rows, width);
  }

  /// The gradient behind a dropout: `gradient` itself where nothing is dropped.
  T const* dropped(Stream& stream, Pass const& pass, Place place, T const* gradient) const {
    if (pass.mask.probability == 0.0f) return gradient;
    T* const masked = context_->workspace.narrow_2;
    auto const width = context_->config.n_embd;
    dropout(context_->device, stream, gradient, masked, pass.rows() * width, pass.mask_at(layer_, place),
            pass.first_row() * width);
    return masked;
  }

  /// Backward of a linear layer on normalised rows: `wide` (rows, out) holds the gradient of its result; adds to that
  /// of the rows before the norm. The normalised rows are computed again.
  void linear_backward(Stream& stream, std::int64_t rows, std::int64_t in, std::int64_t out, T const* x,
                       NormStatistics<Compute<T>> const& norm, fsdp::Tensor<T const, 1> norm_weight,
                       fsdp::Tensor<T const, 1> norm_bias, fsdp::Tensor<T const, 2> weight,
                       fsdp::Tensor<Gradient, 1> norm_weight_gradient, fsdp::Tensor<Gradient, 1> norm_bias_gradient,
                       fsdp::Tensor<Gradient, 2> weight_gradient, fsdp::Tensor<Gradient, 1> bias_gradient,
                       Adapter<T const> const& adapter, Adapter<Gradient> const& adapter_gradient, T* gradient) const {
    auto const& work = context_->workspace;
    auto const& device = context_->device;
    auto& gemm = *context_->gemm;
    bias_backward(device, stream, static_cast<T const*>(work.wide), rows, out, bias_gradient.data, work.partials,
                  bias_gradient.fresh);
    if (weight_gradient.wanted() || adapter_gradient.a.wanted())
      layer_norm_forward(device, stream, x, norm_weight.data, norm_bias.data, work.narrow, norm.mean, norm.scale, rows,
                         in);
    linear_weight_gradient(gemm, stream, rows, in, out, work.narrow, work.wide, out, weight_gradient.data,
                           weight_gradient.fresh);
    context_->adapters.low_gradient(stream, rows, adapter, work.wide, out);
    context_->adapters.weight_gradients(stream, rows, adapter, adapter_gradient, work.narrow, work.wide, out);
    linear_input_gradient(gemm, stream, rows, in, out, work.wide, out, weight.data, work.narrow);
    context_->adapters.input_gradient(stream, rows, adapter, work.narrow);
    layer_norm_backward(device, stream, static_cast<T const*>(work.narrow), x, norm_weight.data, norm.mean, norm.scale,
                        static_cast<T const*>(gradient), gradient, norm_weight_gradient.data, norm_bias_gradient.data,
                        rows, in, work.partials, norm_weight_gradient.fresh);
  }

  Context<D, T> const* context_;
  CausalAttention<D, T> attention_;
  std::int64_t layer_;
};

template <class D, class T>
void Block<D, T>::forward(Stream& stream, Params<T const> const& w, Pass const& pass, BlockActivations<T> const& a,
                          Forward part) const {
  until_hidden(stream, w, pass, a);
  auto const& work = context_->workspace;
  auto const rows = pass.rows(), width = context_->config.n_embd;
  if (part == Forward::without_output)
    return bias_add(context_->device, stream, a.hidden, w.up_bias.data, rows, 4 * width);
  with_formula([&](auto formula) {
    bias_gelu_forward<decltype(formula)>(context_->device, stream, a.hidden, w.up_bias.data, work.wide, rows,
                                         4 * width);
  });
  linear(*context_->gemm, stream, rows, 4 * width, width, work.wide, w.down_weight.data, work.narrow, width);
  context_->adapters.forward(stream, rows, w.down, work.wide, work.narrow, width);
  add_residual(stream, pass, mlp_mask, a.middle, w.down_bias.data, a.output);
}

template <class D, class T>
void Block<D, T>::backward(Stream& stream, Params<T const> const& w, Params<Gradient> const& g, Pass const& pass,
                           BlockActivations<T> const& a, T* gradient) const {
  auto const& work = context_->workspace;
  auto const& device = context_->device;
  auto& gemm = *context_->gemm;
  auto const rows = pass.rows(), width = context_->config.n_embd;
  if (context_->plan.segment == 1 && context_->plan.recomputes(layer_))
    forward(stream, w, pass, a, Forward::without_output);

  // MLP. a.hidden becomes GELU's result as GELU's derivative is taken.
  T const* const down = dropped(stream, pass, mlp_mask, gradient);
  bias_backward(device, stream, down, rows, width, g.down_bias.data, work.partials, g.down_bias.fresh);
  linear_input_gradient(gemm, stream, rows, 4 * width, width, down, width, w.down_weight.data, work.wide);
  context_->adapters.low_gradient(stream, rows, w.down, down, width);
  context_->adapters.input_gradient(stream, rows, w.down, work.wide);
  with_formula(
      [&](auto formula) { gelu_backward<decltype(formula)>(device, stream, a.hidden, work.wide, rows * 4 * width); });
  linear_weight_gradient(gemm, stream, rows, 4 * width, width, a.hidden, down, width, g.down_weight.data,
                         g.down_weight.fresh);
  context_->adapters.weight_gradients(stream, rows, w.down, g.down, a.hidden, down, width);
  linear_backward(stream, rows, width, 4 * width, a.middle, a.norm_2, w.norm_2_weight, w.norm_2_bias, w.up_weight,
                  g.norm_2_weight, g.norm_2_bias, g.up_weight, g.up_bias, w.up, g.up, gradient);

  // Attention.
  T const* const mix = dropped(stream, pass, mix_mask, gradient);
  bias_backward(device, stream, mix, rows, width, g.mix_bias.data, work.partials, g.mix_bias.fresh);
  linear_weight_gradient(gemm, stream, rows, width, width, a.mixed, mix, width, g.mix_weight.data, g.mix_weight.fresh);
  linear_input_gradient(gemm, stream, rows, width, width, mix, width, w.mix_weight.data, work.narrow);
  context_->adapters.low_gradient(stream, rows, w.mix, mix, width);
  context_->adapters.input_gradient(stream, rows, w.mix, work.narrow);
  context_->adapters.weight_gradients(stream, rows, w.mix, g.mix, a.mixed, mix, width);
  attention_.backward(stream, pass, pass.mask_at(layer_, attention_mask), a.qkv, a.mixed, a.log_sums, work.narrow,
                      work.wide);
  linear_backward(stream, rows, width, 3 * width, a.input, a.norm_1, w.norm_1_weight, w.norm_1_bias, w.qkv_weight,
                  g.norm_1_weight, g.norm_1_bias, g.qkv_weight, g.qkv_bias, w.qkv, g.qkv, gradient);
}

}  // namespace nanogpt
