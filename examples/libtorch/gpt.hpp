// SPDX-License-Identifier: Apache-2.0
// A GPT of torch::nn modules: an embedding, blocks and a head, each a module of its own.
#pragma once

#include <torch/torch.h>

#include <cmath>
#include <cstdint>

namespace example {

struct Sizes {
  std::int64_t vocabulary = 256, width = 128, heads = 4, layers = 4, length = 64;
};

inline torch::nn::LayerNorm norm(Sizes const& sizes) {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({sizes.width}));
}

/// (rows, length) tokens to (rows, length, width).
struct EmbedImpl : torch::nn::Module {
  explicit EmbedImpl(Sizes const& sizes) : wte(sizes.vocabulary, sizes.width), wpe(sizes.length, sizes.width) {
    register_module("wte", wte);
    register_module("wpe", wpe);
    torch::NoGradGuard const no_grad;
    for (auto& parameter : parameters()) parameter.normal_(0.0, 0.02);
  }
  torch::Tensor forward(torch::Tensor const& tokens) { return wte(tokens) + wpe->weight.slice(0, 0, tokens.size(1)); }
  torch::nn::Embedding wte, wpe;
};
TORCH_MODULE(Embed);

/// (rows, length, width) to the same.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(Sizes const& sizes)
      : heads(sizes.heads),
        ln_1(norm(sizes)),
        ln_2(norm(sizes)),
        c_attn(sizes.width, 3 * sizes.width),
        c_proj(sizes.width, sizes.width),
        c_fc(sizes.width, 4 * sizes.width),
        c_out(4 * sizes.width, sizes.width) {
    register_module("ln_1", ln_1);
    register_module("attn_c_attn", c_attn);
    register_module("attn_c_proj", c_proj);
    register_module("ln_2", ln_2);
    register_module("mlp_c_fc", c_fc);
    register_module("mlp_c_proj", c_out);
  }
  torch::Tensor forward(torch::Tensor x) {
    x = x + attention(ln_1(x));
    return x + c_out(torch::gelu(c_fc(ln_2(x))));
  }
  torch::Tensor attention(torch::Tensor const& x) {
    auto const rows = x.size(0), length = x.size(1), width = x.size(2);
    auto const qkv = c_attn(x).view({rows, length, 3, heads, width / heads}).permute({2, 0, 3, 1, 4}).unbind(0);
    auto const scores = torch::matmul(qkv[0], qkv[1].transpose(-2, -1)) / std::sqrt(static_cast<double>(width / heads));
    auto const later = torch::ones({length, length}, x.options().dtype(torch::kBool)).triu(1);
    auto const mixed = torch::matmul(torch::softmax(scores.masked_fill(later, -1e9), -1), qkv[2]);
    return c_proj(mixed.transpose(1, 2).reshape({rows, length, width}));
  }
  std::int64_t heads;
  torch::nn::LayerNorm ln_1, ln_2;
  torch::nn::Linear c_attn, c_proj, c_fc, c_out;
};
TORCH_MODULE(Block);

/// (rows, length, width) to (rows, length, vocabulary) logits.
struct HeadImpl : torch::nn::Module {
  explicit HeadImpl(Sizes const& sizes)
      : ln_f(norm(sizes)), lm_head(torch::nn::LinearOptions(sizes.width, sizes.vocabulary).bias(false)) {
    register_module("ln_f", ln_f);
    register_module("lm_head", lm_head);
  }
  torch::Tensor forward(torch::Tensor const& x) { return lm_head(ln_f(x)); }
  torch::nn::LayerNorm ln_f;
  torch::nn::Linear lm_head;
};
TORCH_MODULE(Head);

}  // namespace example
