// SPDX-License-Identifier: Apache-2.0
// Modules whose gradients are a formula of rank, step and element, in any precision: what tests of optimizers train.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/fsdp.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"
#include "tests/support/sanitized.hpp"
#include "tests/support/shard_group.hpp"

namespace toy {

/// One backward pass of one rank.
struct Push {
  std::int64_t step = 0;
  int rank = 0;
  float const* scale = nullptr;  ///< device memory, multiplied into the gradients; may be null
  float size = 1.0f;             ///< of the gradients
  bool plant = false;            ///< one element of the weight's gradient becomes infinite
  bool alike = false;            ///< all ranks push alike, by values of bf16: the mean is exact in any world
};

/// A value in [-1, 1) of (salt, i): equal on every rank and in tests that recompute it.
FSDP_HD inline float noise(std::uint32_t salt, std::int64_t i) {
  auto h = salt ^ static_cast<std::uint32_t>(i * 104729 + 1);
  h ^= h >> 16, h *= 0x7feb352du, h ^= h >> 15, h *= 0x846ca68bu, h ^= h >> 16;
  return static_cast<float>(h >> 8) * (2.0f / 16777216.0f) - 1.0f;
}
FSDP_HD inline std::uint32_t salt_of(std::int64_t step, int rank, std::uint32_t tensor) {
  return static_cast<std::uint32_t>(step * 31 + rank * 7) * 2654435761u + tensor * 40503u;
}
/// The formula: pulls towards a noisy point. Reads the parameter, so that a wrong gather shows.
FSDP_HD inline float gradient_of(float parameter, std::uint32_t salt, std::int64_t i, float size) {
  return size * (0.25f * parameter + noise(salt, i));
}

struct WriteGradient {
  template <class Block, class T, class R>
  FSDP_HD void operator()(Block const& block, std::int64_t, T const* w, R* g, std::int64_t n, std::uint32_t salt,
                          float const* scale, float size, bool coarse, bool plant) const {
    float const factor = scale == nullptr ? 1.0f : *scale;
    for (std::int64_t i = block.thread(); i < n; i += block.threads()) {
      float value = factor * gradient_of(fsdp::widen(w[i]), salt, i, size);
      if (coarse) value = fsdp::widen(fsdp::narrow<fsdp::bf16>(value));
      if (plant && i == n / 2) value = std::numeric_limits<float>::infinity();
      g[i] = fsdp::narrow<R>(fsdp::widen(g[i]) + value);
    }
  }
};

template <class D>
struct Patch {
  D device;
  std::int64_t rows, columns;
  std::uint32_t index;
  template <class T>
  struct Params {
    fsdp::Tensor<T, 2> weight;  // (rows, columns)
    fsdp::Tensor<T, 1> bias;    // (columns), no decay
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor("weight", p.weight, {rows, columns}, fsdp::TensorOptions{.init = fsdp::init::normal(0.5f)});
    tensor("bias", p.bias, {columns}, fsdp::TensorOptions{.decay = false, .init = fsdp::init::uniform(-0.5f, 0.5f)});
  }
  template <class T>
  void forward(typename D::Stream&, Params<T> const&) const {}
  template <class T, class R>
  void backward(typename D::Stream& s, Params<T> const& w, Params<R> const& g, Push const& push) const {
    device.launch(s, std::int64_t{1}, WriteGradient{}, w.weight.data, g.weight.data, w.weight.numel(),
                  salt_of(push.step, push.rank, 2 * index), push.scale, push.size, push.alike, push.plant);
    device.launch(s, std::int64_t{1}, WriteGradient{}, w.bias.data, g.bias.data, w.bias.numel(),
                  salt_of(push.step, push.rank, 2 * index + 1), push.scale, push.size, push.alike, false);
  }
};

/// Three units of unequal size.
template <class E>
class Patches {
 public:
  using D = typename E::Device;
  explicit Patches(E& engine) : engine_(&engine) {
    std::uint32_t index = 0;
    for (auto const& [rows, columns] : {std::pair{7, 31}, std::pair{40, 9}, std::pair{3, 130}}) {
      modules_.push_back(
          engine.shard(Patch<D>{engine.device(), rows, columns, index}, "patches." + std::to_string(index)));
      ++index;
    }
  }
  ~Patches() { engine_->drain(); }
  /// Forward and backward. @param plant_in  the unit to plant an infinity in, -1: none
  void step(Push push, int plant_in = -1) {
    push.rank = push.alike ? 0 : engine_->rank();
    for (auto& patch : modules_) patch.forward();
    for (std::size_t i = modules_.size(); i-- > 0;) {
      push.plant = static_cast<int>(i) == plant_in;
      modules_[i].backward(push);
    }
  }

 private:
  E* engine_;
  std::vector<fsdp::ShardedModule<Patch<D>, E>> modules_;
};

/// Full tensors, one after another; on rank 0.
template <class E>
std::vector<float> all_parameters(E& engine) {
  std::vector<float> all;
  fsdp::export_full(engine, [&](fsdp::TensorInfo const&, std::span<float const> values) {
    all.insert(all.end(), values.begin(), values.end());
  });
  return all;
}
template <class E>
std::vector<float> all_gradients(E& engine) {
  std::vector<float> all;
  fsdp::export_gradients(engine, [&](fsdp::TensorInfo const&, std::span<float const> values) {
    all.insert(all.end(), values.begin(), values.end());
  });
  return all;
}

/// A strategy, and the ranks of a world and of a shard group.
struct World {
  fsdp::ShardingStrategy strategy;
  int ranks, group;
};
/// Every strategy on 1 to 4 ranks; under a sanitizer some of them. The first world is one rank.
inline std::vector<World> worlds() {
  if (fsdp::testing::sanitized)
    return {{fsdp::FullShard{}, 1, 0},
            {fsdp::FullShard{}, 3, 0},
            {fsdp::ShardGradOp{}, 2, 0},
            {fsdp::NoShard{}, 2, 0},
            {fsdp::HybridShard<>{}, 4, 2}};
  std::vector<World> all;
  for (int ranks = 1; ranks <= 4; ++ranks) {
    all.push_back({fsdp::FullShard{}, ranks, 0});
    all.push_back({fsdp::ShardGradOp{}, ranks, 0});
    all.push_back({fsdp::NoShard{}, ranks, 0});
    if (ranks % 2 == 0) all.push_back({fsdp::HybridShard<>{}, ranks, ranks / 2});
  }
  return all;
}

using LocalHost = fsdp::local::Communicator<fsdp::host::Device>;

/// Runs `body(engine, patches)` on `ranks` threads. @return what rank 0's returned
template <class P, class Body>
auto on_patches(fsdp::ShardingStrategy const& strategy, int ranks, int shard_group, Body const& body,
                fsdp::EngineOptions options = {}) {
  using E = fsdp::Engine<LocalHost, P>;
  std::optional<decltype(body(std::declval<E&>(), std::declval<Patches<E>&>()))> result;
  fsdp::local::run(ranks, fsdp::host::Device{}, [&](LocalHost comm) {
    bool const first = comm.rank() == 0;
    fsdp::Mesh<LocalHost> mesh(std::move(comm));
    E engine(mesh, fsdp::testing::in_groups_of(shard_group, strategy), options);
    Patches<E> patches(engine);
    auto mine = body(engine, patches);
    if (first) result = std::move(mine);
  });
  return std::move(*result);
}

}  // namespace toy
