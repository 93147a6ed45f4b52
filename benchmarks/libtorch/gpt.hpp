// SPDX-License-Identifier: Apache-2.0
// The GPT of benchmarks/peers/pytorch_gpt.py in torch::nn: no biases, no dropout, exact GELU, the head is the token
// table.
#pragma once

#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <utility>

#include "examples/libtorch/gpt.hpp"

namespace bench {

using at::Tensor;

using example::Embed;
using example::EmbedImpl;
using example::Sizes;

inline torch::nn::Linear linear(std::int64_t from, std::int64_t to) {
  return torch::nn::Linear(torch::nn::LinearOptions(from, to).bias(false));
}

/// Layer norm with weights alone.
struct NormImpl : torch::nn::Module {
  explicit NormImpl(std::int64_t width) : weight(register_parameter("weight", torch::ones({width}))) {}
  Tensor forward(Tensor const& x) { return torch::layer_norm(x, {x.size(-1)}, weight); }
  Tensor weight;
};
TORCH_MODULE(Norm);

/// Causal attention. @param query, key, value  (rows, heads, length, head size)
inline Tensor attention(Tensor const& query, Tensor const& key, Tensor const& value) {
#if TORCH_VERSION_MAJOR >= 2
  return at::scaled_dot_product_attention(query, key, value, {}, 0.0, true);
#else
  auto const length = query.size(2);
  auto const scores = torch::matmul(query, key.transpose(-2, -1)) / std::sqrt(static_cast<double>(query.size(3)));
  auto const later = torch::ones({length, length}, torch::kBool).triu(1);
  return torch::matmul(torch::softmax(scores.masked_fill(later, -INFINITY), -1), value);
#endif
}

/// x + attention(norm(x)), then x + mlp(norm(x)).
struct LayerImpl : torch::nn::Module {
  explicit LayerImpl(Sizes const& sizes)
      : heads(sizes.heads),
        norm_1(sizes.width),
        norm_2(sizes.width),
        qkv(linear(sizes.width, 3 * sizes.width)),
        mix(linear(sizes.width, sizes.width)),
        up(linear(sizes.width, 4 * sizes.width)),
        down(linear(4 * sizes.width, sizes.width)) {
    register_module("norm_1", norm_1);
    register_module("qkv", qkv);
    register_module("mix", mix);
    register_module("norm_2", norm_2);
    register_module("up", up);
    register_module("down", down);
    torch::NoGradGuard const no_grad;
    double const residual = 0.02 / std::sqrt(2.0 * static_cast<double>(sizes.layers));
    for (auto& weight : {qkv->weight, up->weight}) weight.normal_(0.0, 0.02);
    for (auto& weight : {mix->weight, down->weight}) weight.normal_(0.0, residual);
  }
  Tensor forward(Tensor x) {
    auto const rows = x.size(0), length = x.size(1), width = x.size(2);
    auto const packed = qkv(norm_1(x)).view({rows, length, 3, heads, width / heads}).permute({2, 0, 3, 1, 4}).unbind(0);
    auto const mixed = attention(packed[0], packed[1], packed[2]);
    x = x + mix(mixed.transpose(1, 2).reshape({rows, length, width}));
    return x + down(torch::gelu(up(norm_2(x))));
  }
  std::int64_t heads;
  Norm norm_1, norm_2;
  torch::nn::Linear qkv, mix, up, down;
};
TORCH_MODULE(Layer);

/// Logits: the head is the token table. It has no parameters of its own.
struct HeadImpl : torch::nn::Module {
  explicit HeadImpl(std::shared_ptr<EmbedImpl> of) : embed(std::move(of)) {}
  Tensor forward(Tensor const& x) { return torch::linear(x, embed->wte->weight); }
  std::shared_ptr<EmbedImpl> embed;
};
TORCH_MODULE(Head);

}  // namespace bench
