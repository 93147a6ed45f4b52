// SPDX-License-Identifier: Apache-2.0
// Trains a network with plain torch on the whole batch, and sharded on a communicator's ranks.
#pragma once

#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/fsdp.hpp"
#include "fsdp/host.hpp"
#include "fsdp/libtorch.hpp"
#include "fsdp/paths.hpp"
#include "tests/libtorch/networks.hpp"

namespace networks {

using Named = std::map<std::string, Tensor>;

struct Settings {
  int steps = 4;
  int first_step = 0;
  int micro_steps = 1;  ///< all but the last under no_sync
  double clip = 0.0;    ///< 0: none
  bool torch_optimizer = false;
  bool evaluates = false;  ///< between steps
  fsdp::EngineOptions options{};
};
struct Result {
  std::vector<double> losses;
  std::vector<Named> gradients;  ///< by step, before clipping
  Named parameters;
};

constexpr double rate = 1e-2;
inline torch::optim::AdamWOptions adamw_options() { return torch::optim::AdamWOptions(rate).weight_decay(0.1); }

/// On the whole batch. In bf16 with fp32 masters if `bf16`.
inline Result train_plain(Network const& network, Settings const& settings, bool bf16 = false) {
  Result result;
  auto const layers = build(network);
  std::vector<std::pair<std::string, Tensor>> parameters;
  std::vector<Tensor> trained, masters;
  for (std::size_t i = 0; i < layers.size(); ++i)
    for (auto const& item : layers[i]->named_parameters())
      parameters.emplace_back(std::to_string(i) + "." + item.key(), item.value());
  for (auto& [name, parameter] : parameters) {
    auto master = parameter;
    if (bf16) {
      master = parameter.detach().clone().set_requires_grad(parameter.requires_grad());
      parameter.set_data(parameter.detach().to(at::kBFloat16));
    }
    masters.push_back(master);
    if (parameter.requires_grad()) trained.push_back(master);
  }
  torch::optim::AdamW adamw(trained, adamw_options());
  Call const call = [&](std::size_t i, Tensor const& x, Tensor const& other) { return layers[i]->forward(x, other); };
  CallTwo const two = [&](std::size_t i, Tensor const& x) { return layers[i]->two(x); };
  for (int step = settings.first_step; step < settings.first_step + settings.steps; ++step) {
    double sum = 0;
    for (auto& [name, parameter] : parameters) parameter.mutable_grad().reset();
    for (int micro = 0; micro < settings.micro_steps; ++micro) {
      auto const [x, y] = batch(network, step, micro);
      auto const loss =
          network.loss(call, two, bf16 && !network.tokens ? x.to(at::kBFloat16) : x, y) / settings.micro_steps;
      loss.backward();
      sum += loss.item<double>();
    }
    result.losses.push_back(sum);
    auto& gradients = result.gradients.emplace_back();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      auto const& [name, parameter] = parameters[i];
      if (!parameter.requires_grad()) continue;
      // A unit that the loss does not need has a zero gradient, which decays the weight.
      auto const gradient =
          parameter.grad().defined() ? parameter.grad().to_dense().to(at::kFloat) : torch::zeros_like(masters[i]);
      gradients[name] = gradient.clone();
      masters[i].mutable_grad() = gradient;
    }
    if (settings.clip > 0) torch::nn::utils::clip_grad_norm_(trained, settings.clip);
    adamw.step();
    torch::NoGradGuard const no_grad;
    for (std::size_t i = 0; bf16 && i < parameters.size(); ++i) parameters[i].second.copy_(masters[i]);
  }
  for (std::size_t i = 0; i < parameters.size(); ++i)
    result.parameters[parameters[i].first] = masters[i].detach().clone();
  return result;
}

inline fsdp::ShardingStrategy const strategies[] = {fsdp::FullShard{}, fsdp::ShardGradOp{}, fsdp::NoShard{}};

/// A compute stream for torch's kernels of the host.
inline fsdp::host::Stream compute_stream(fsdp::host::Device const&) {
  return fsdp::host::Stream::inline_stream("compute");
}

/// A rank's engine, units and optimizers.
template <class Comm, class Precision = fsdp::Fp32>
struct Trainer {
  using Engine = fsdp::Engine<Comm, Precision>;
  using Unit = fsdp::libtorch::Sharded<LayerImpl>;

  Trainer(Comm comm, Network const& of, fsdp::ShardingStrategy const& strategy, Settings const& with)
      : network(of),
        settings(with),
        mesh(std::move(comm)),
        engine(mesh, strategy, Precision{}, options(of, with), compute),
        sharder(engine) {
    at::set_num_threads(1);  // a rank has its own
    auto const layers = build(network);
    for (std::size_t i = 0; i < layers.size(); ++i) {
      auto const name = std::to_string(i);
      units.push_back(network.kinds[i] == "tied head" ? sharder.share(units[0], layers[i], name)
                                                      : sharder.shard(layers[i], name));
    }
    if (!network.path.empty()) {
      std::vector<fsdp::UseId> uses;
      for (auto const use : network.path) uses.push_back(units[use]);
      path = engine.add_path("path", uses);
    }
    call = [this](std::size_t i, Tensor const& x, Tensor const& other) { return units[i](x, other); };
    two = [this](std::size_t i, Tensor const& x) { return units[i].call([&](LayerImpl& m) { return m.two(x); }); };
  }
  static fsdp::EngineOptions options(Network const& network, Settings const& with) {
    auto options = with.options;
    options.allow_no_sync = with.micro_steps > 1;
    if (!network.path.empty()) options.without_gradient = fsdp::WithoutGradient::zeros;
    return options;
  }

  /// The loss of this rank's rows.
  Tensor loss(int step, int micro = 0) {
    auto const follow = engine.follow(path);
    auto [x, y] = batch(network, step, micro);
    auto const own = rows / engine.world_size();
    x = x.slice(0, engine.rank() * own, (engine.rank() + 1) * own);
    y = y.slice(0, engine.rank() * own, (engine.rank() + 1) * own);
    if (!std::is_same_v<typename Precision::Param, float> && !network.tokens) x = x.to(at::kBFloat16);
    return network.loss(call, two, x, y) / settings.micro_steps;
  }
  /// Gradients of a step; optimizers are not called.
  double backward(int step) {
    double sum = 0;
    for (int micro = 0; micro < settings.micro_steps; ++micro) {
      auto const wait = engine.no_sync(micro + 1 < settings.micro_steps);
      auto const of = loss(step, micro);
      of.backward();
      sum += of.template item<double>();
    }
    return engine.mean_over_ranks({sum})[0];
  }
  Named exported(bool gradients) {
    Named all;
    auto const take = [&](fsdp::TensorInfo const& tensor, std::span<float const> values) {
      all[tensor.name] = torch::from_blob(const_cast<float*>(values.data()), tensor.shape, at::kFloat).clone();
    };
    if (gradients)
      fsdp::export_gradients(engine, take);
    else
      fsdp::export_full(engine, take);
    return all;
  }
  void make_optimizer() {
    if (settings.torch_optimizer)
      torch_adamw.emplace(engine, adamw_options());
    else
      adamw.emplace(
          engine,
          fsdp::AdamWOptions{
              .lr = static_cast<float>(rate), .beta1 = 0.9f, .beta2 = 0.999f, .eps = 1e-8f, .weight_decay = 0.1f});
  }
  void step() {
    if (!adamw && !torch_adamw) make_optimizer();
    fsdp::GradNorm<Engine> norm;
    if (settings.clip > 0) norm = fsdp::clip_grad_norm(engine, static_cast<float>(settings.clip));
    if (adamw)
      adamw->step(norm);
    else
      torch_adamw->step(norm);
  }
  void evaluate() {
    torch::NoGradGuard const no_grad;
    auto const evaluation = engine.evaluation();
    static_cast<void>(loss(77));
  }
  Result train() {
    Result result;
    for (int step = settings.first_step; step < settings.first_step + settings.steps; ++step) {
      result.losses.push_back(backward(step));
      result.gradients.push_back(exported(true));
      this->step();
      if (settings.evaluates) evaluate();
    }
    result.parameters = exported(false);
    return result;
  }

  Network network;
  Settings settings;
  fsdp::Mesh<Comm> mesh;
  typename Comm::Device::Stream compute = compute_stream(mesh.world().device());
  Engine engine;
  fsdp::libtorch::Sharder<Engine> sharder;
  std::vector<Unit> units;
  fsdp::PathId path{};
  Call call;
  CallTwo two;
  std::optional<fsdp::AdamW<Engine>> adamw;
  std::optional<fsdp::libtorch::ShardOptimizer<Engine, torch::optim::AdamWOptions>> torch_adamw;
};

/// Relative to plain torch, after few steps: sums over rows in another order. Of later steps, gradients differ as much
/// as the weights do, which AdamW moves by the sign of the smallest gradients.
constexpr double loss_tolerance = 2e-6, gradient_tolerance = 1e-6;

/// The largest differences of a run from another.
struct Difference {
  double loss = 0;       ///< absolute
  double gradient = 0;   ///< in the first step: norm of the difference over the norm, of the worst tensor
  double parameter = 0;  ///< absolute
  bool same_tensors = true;
  bool equal_gradients = true;  ///< bitwise, in all steps
};
/// "" if the differences are within the tolerances, else what they are.
inline std::string fault(Difference const& of) {
  if (of.loss <= loss_tolerance && of.gradient <= gradient_tolerance && of.same_tensors) return {};
  return fsdp::formatted("losses differ by {}, gradients by {}, {} tensors", of.loss, of.gradient,
                         of.same_tensors ? "the same" : "other");
}
inline Difference difference(Result const& a, Result const& b) {
  Difference worst;
  for (std::size_t step = 0; step < a.losses.size(); ++step) {
    worst.loss = std::max(worst.loss, std::abs(a.losses[step] - b.losses[step]));
    worst.same_tensors = worst.same_tensors && a.gradients[step].size() == b.gradients[step].size();
    for (auto const& [name, gradient] : a.gradients[step]) {
      auto const found = b.gradients[step].find(name);
      if (found == b.gradients[step].end()) {
        worst.same_tensors = false;
        continue;
      }
      worst.equal_gradients = worst.equal_gradients && torch::equal(gradient, found->second);
      if (step > 0) continue;
      auto const norm = gradient.norm().item<double>(), apart = (gradient - found->second).norm().item<double>();
      worst.gradient = std::max(worst.gradient, norm == 0 ? apart : apart / norm);
    }
  }
  worst.same_tensors = worst.same_tensors && a.parameters.size() == b.parameters.size();
  for (auto const& [name, parameter] : a.parameters) {
    auto const found = b.parameters.find(name);
    if (found == b.parameters.end())
      worst.same_tensors = false;
    else
      worst.parameter = std::max(worst.parameter, (parameter - found->second).abs().max().item<double>());
  }
  return worst;
}

}  // namespace networks
