// SPDX-License-Identifier: Apache-2.0
// Networks of torch::nn modules that the tests train with plain torch on the whole batch, and sharded on ranks.
#pragma once

#include "tests/libtorch/catch.hpp"

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace networks {

using at::Tensor;

constexpr std::int64_t width = 16, rows = 12, vocabulary = 24, length = 6;

/// One unit: of several kinds in one type, so that networks are vectors.
struct LayerImpl : torch::nn::Module {
  explicit LayerImpl(std::string of, std::shared_ptr<LayerImpl> with = nullptr) : kind(std::move(of)), tied(with) {
    namespace nn = torch::nn;
    if (kind == "conv") conv = register_module("conv", nn::Conv2d(nn::Conv2dOptions(1, 1, 3).padding(1)));
    if (kind == "lstm") lstm = register_module("lstm", nn::LSTM(nn::LSTMOptions(width, width).batch_first(true)));
    if (kind == "sparse") table = register_module("table", nn::Embedding(nn::EmbeddingOptions(16, width).sparse(true)));
    if (kind == "norm") batch_norm = register_module("bn", nn::BatchNorm1d(width));
    if (kind == "embed") {
      table = register_module("wte", nn::Embedding(vocabulary, width));
      positions = register_module("wpe", nn::Embedding(length, width));
      torch::NoGradGuard const no_grad;
      table->weight.mul_(0.1);
      positions->weight.mul_(0.1);
    }
    if (kind == "block") {
      ln1 = register_module("ln_1", nn::LayerNorm(nn::LayerNormOptions({width})));
      qkv = register_module("c_attn", nn::Linear(width, 3 * width));
      proj = register_module("c_proj", nn::Linear(width, width));
      ln2 = register_module("ln_2", nn::LayerNorm(nn::LayerNormOptions({width})));
      linear = register_module("up", nn::Linear(width, 4 * width));
      down = register_module("down", nn::Linear(4 * width, width));
    }
    if (kind == "head")
      linear = register_module("lm_head", nn::Linear(nn::LinearOptions(width, vocabulary).bias(false)));
    if (kind == "linear" || kind == "frozen" || kind == "half" || kind == "two" || kind == "view" || kind == "throws")
      linear = register_module("linear", nn::Linear(width, width));
    if (kind == "frozen")
      for (auto& parameter : parameters()) parameter.requires_grad_(false);
    if (kind == "half") linear->bias.requires_grad_(false);
  }

  Tensor attend(Tensor const& x) {
    auto const batch = x.size(0), time = x.size(1);
    constexpr std::int64_t heads = 4;
    auto const parts = qkv(ln1(x)).view({batch, time, 3, heads, width / heads}).permute({2, 0, 3, 1, 4}).unbind(0);
    auto const scores = torch::matmul(parts[0], parts[1].transpose(-2, -1)) * 0.5;
    auto const mask = torch::ones({time, time}, torch::kBool).triu(1);
    auto const mixed = torch::matmul(torch::softmax(scores.masked_fill(mask, -1e9), -1), parts[2]);
    return proj(mixed.transpose(1, 2).contiguous().view({batch, time, width}));
  }
  Tensor forward(Tensor x, Tensor const& other = {}) {
    if (other.defined()) x = x + other;
    if (kind == "conv") return torch::tanh(conv(x.reshape({x.size(0), 1, 4, -1})).reshape({x.size(0), -1}));
    if (kind == "lstm") return std::get<0>(lstm(x.unsqueeze(1).expand({-1, 3, -1}))).select(1, 2);
    if (kind == "sparse") return table((x.select(1, 0) * 7).abs().to(torch::kLong).clamp(0, 15));
    if (kind == "norm") return batch_norm(x);
    if (kind == "embed") return table(x) + positions(torch::arange(x.size(1), torch::kLong)).unsqueeze(0);
    if (kind == "block") {
      x = x + attend(x);
      return x + down(torch::gelu(linear(ln2(x))));
    }
    if (kind == "head") return linear(x);
    if (kind == "tied head") return torch::linear(torch::layer_norm(x, {x.size(-1)}), tied->table->weight);
    if (kind == "nothing") return torch::tanh(x);
    if (kind == "same") return x;
    if (kind == "view") return linear->weight.view({-1});
    if (kind == "throws") return after(torch::tanh(linear(x)));
    return torch::tanh(linear(x));
  }
  /// Two outputs, of which the first may be left out.
  std::tuple<Tensor, std::vector<Tensor>> two(Tensor const& x) {
    auto const y = linear(x);
    return {torch::tanh(y), {torch::sin(y), Tensor()}};
  }

  std::string kind;
  std::shared_ptr<LayerImpl> tied;
  std::function<Tensor(Tensor)> after = [](Tensor x) { return x; };
  torch::nn::Linear linear{nullptr}, qkv{nullptr}, proj{nullptr}, down{nullptr};
  torch::nn::LayerNorm ln1{nullptr}, ln2{nullptr};
  torch::nn::Conv2d conv{nullptr};
  torch::nn::LSTM lstm{nullptr};
  torch::nn::BatchNorm1d batch_norm{nullptr};
  torch::nn::Embedding table{nullptr}, positions{nullptr};
};
using Layer = std::shared_ptr<LayerImpl>;

/// Calls a unit by number.
using Call = std::function<Tensor(std::size_t, Tensor const&, Tensor const&)>;
using CallTwo = std::function<std::tuple<Tensor, std::vector<Tensor>>(std::size_t, Tensor const&)>;

struct Network {
  std::string name;
  std::vector<std::string> kinds;  ///< of units, in declared order; "tied head" is a further use of unit 0
  /// Loss of inputs (rows...) and targets, a mean over rows.
  std::function<Tensor(Call const&, CallTwo const&, Tensor const& x, Tensor const& y)> loss;
  std::vector<std::size_t> path{};  ///< if not empty: the uses of a path that passes follow
  bool tokens = false;              ///< inputs are tokens
};

/// Names are those of named_parameters(), after the number of the unit. All ranks build the same: the default generator
/// of torch is one for all threads.
inline std::vector<Layer> build(Network const& network) {
  static std::mutex generator;
  std::lock_guard const lock(generator);
  torch::manual_seed(3);
  std::vector<Layer> layers;
  for (auto const& kind : network.kinds)
    layers.push_back(std::make_shared<LayerImpl>(kind, kind == "tied head" ? layers.front() : nullptr));
  return layers;
}

/// Inputs and targets of a micro-step.
inline std::pair<Tensor, Tensor> batch(Network const& network, int step, int micro = 0) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(100 + step * 10 + micro));
  if (!network.tokens) return {torch::randn({rows, width}, generator), torch::randn({rows, width}, generator)};
  auto const tokens = torch::randint(0, vocabulary, {rows, length + 1}, generator, torch::kLong);
  return {tokens.slice(1, 0, length), tokens.slice(1, 1)};
}

inline Tensor mean_square(Tensor const& y, Tensor const& target) {
  return (y - target.slice(1, 0, y.size(1))).pow(2).mean();
}
inline Tensor cross_entropy(Tensor const& logits, Tensor const& targets) {
  return torch::nn::functional::cross_entropy(logits.to(at::kFloat).reshape({-1, vocabulary}), targets.reshape({-1}));
}

inline std::vector<Network> all() {
  Tensor const none;
  auto const chain = [](Call const& f, CallTwo const&, Tensor x, Tensor const& y, std::size_t units) {
    for (std::size_t i = 0; i < units; ++i) x = f(i, x, {});
    return mean_square(x, y);
  };
  auto const chain_of = [chain](std::size_t units) {
    return [chain, units](Call const& f, CallTwo const& g, Tensor const& x, Tensor const& y) {
      return chain(f, g, x, y, units);
    };
  };
  auto const gpt = [](std::size_t blocks) {
    return [blocks](Call const& f, CallTwo const&, Tensor x, Tensor const& y) {
      for (std::size_t i = 0; i < blocks + 2; ++i) x = f(i, x, {});
      return cross_entropy(x, y);
    };
  };
  return {
      {"gpt", {"embed", "block", "block", "block", "head"}, gpt(3), {}, true},
      {"tied gpt", {"embed", "block", "block", "tied head"}, gpt(2), {}, true},
      {"six layers", {"linear", "linear", "linear", "linear", "linear", "linear"}, chain_of(6)},
      {"convolution, lstm, sparse embedding", {"sparse", "conv", "lstm", "linear"}, chain_of(4)},
      {"frozen first", {"frozen", "frozen", "linear", "linear"}, chain_of(4)},
      {"frozen between", {"linear", "frozen", "linear"}, chain_of(3)},
      {"a frozen bias", {"half", "half", "linear"}, chain_of(3)},
      {"units without parameters", {"nothing", "linear", "same", "nothing", "linear", "same"}, chain_of(6)},
      {"skip connections",
       {"linear", "linear", "linear", "linear"},
       [](Call const& f, CallTwo const&, Tensor const& x, Tensor const& y) {
         auto const a = f(0, x, {}), b = f(1, a, {}), c = f(2, b, {});
         return mean_square(f(3, c, a) + b, y);
       }},
      {"parallel towers",
       {"linear", "linear", "linear", "linear"},
       [](Call const& f, CallTwo const&, Tensor const& x, Tensor const& y) {
         auto const a = f(0, x, {}), b = f(1, x, {}), c = f(2, x, {});
         return mean_square(f(3, a * b, c), y);
       }},
      {"an unused unit",
       {"linear", "linear", "linear"},
       [](Call const& f, CallTwo const&, Tensor const& x, Tensor const& y) {
         auto const a = f(0, x, {});
         f(1, a, {});
         return mean_square(f(2, a, {}), y);
       }},
      {"a detached tail",
       {"linear", "linear", "linear"},
       [](Call const& f, CallTwo const&, Tensor const& x, Tensor const& y) {
         return mean_square(f(2, f(1, f(0, x, {}), {}).detach(), {}), y);
       }},
      {"two outputs",
       {"linear", "two", "two", "linear"},
       [](Call const& f, CallTwo const& g, Tensor const& x, Tensor const& y) {
         auto const [a, b] = g(1, f(0, x, {}));
         auto const [c, d] = g(2, a);
         return mean_square(f(3, c + b[0], {}), y);
       }},
      {"in place on an output",
       {"linear", "linear", "linear"},
       [](Call const& f, CallTwo const&, Tensor const& x, Tensor const& y) {
         auto a = f(0, x, {}) * 1.0;
         auto b = f(1, a.add_(1.0), {});
         return mean_square(f(2, b.add(0.5).mul_(2.0), {}), y);
       }},
      {"a path that leaves out and repeats",
       {"linear", "linear", "linear", "linear"},
       [](Call const& f, CallTwo const&, Tensor const& x, Tensor const& y) {
         return mean_square(f(3, f(1, f(1, f(0, x, {}), {}), {}), {}), y);
       },
       {0, 1, 1, 3}},
  };
}
inline Network named(std::string const& name) {
  for (auto& network : all())
    if (network.name == name) return network;
  throw std::invalid_argument("no network " + name);
}

}  // namespace networks
