// SPDX-License-Identifier: Apache-2.0
// An optimizer of your own, momentum SGD, updates the shards of the parameters that its rank keeps.
#include <cstdio>
#include <utility>
#include <vector>

#include "fsdp/fsdp.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"

template <class E>
struct MomentumSgd {
  E& engine;
  std::vector<std::vector<float>> momenta{};  // by unit: a value for each element of this rank's shard

  explicit MomentumSgd(E& of) : engine(of) {
    engine.shards().attach_optimizer();  // seals the engine; from now on, shards have a size
    for (std::size_t u = 0; u < engine.shards().size(); ++u) momenta.emplace_back(engine.shards()[u].shard_numel());
  }
  MomentumSgd(MomentumSgd const&) = delete;
  ~MomentumSgd() { engine.drain(); }  // waits for tasks that use the momenta
  void step(float lr) {
    auto const shards = engine.shards();
    shards.begin_step("MomentumSgd", lr);  // throws if gradients are missing
    for (std::size_t u = 0; u < shards.size(); ++u) {
      auto const& unit = shards[u];
      if (!unit.trains()) continue;
      auto const update = shards.update(unit);  // the stream waits for the unit's gradients, averaged over ranks
      engine.compute().enqueue([lr, w = unit.master, g = unit.gradient, m = momenta[u].data(), n = unit.shard_numel()] {
        for (std::int64_t i = 0; i < n; ++i) w[i] -= lr * (m[i] = 0.5f * m[i] + g[i]);
      });
    }
  }
};

/// A module with the loss (w - 3)^2 / 2, which needs no data.
struct Bowl {
  template <class T>
  struct Params {
    fsdp::Tensor<T, 1> w;
  };
  void describe(auto& params, auto&& tensor) const { tensor("w", params.w, {1}, fsdp::no_decay); }
  void forward(fsdp::host::Stream&, Params<float const> const&) const {}
  void backward(fsdp::host::Stream& stream, Params<float const> const& p, Params<float> const& g) const {
    stream.enqueue([=] { g.w.data[0] += p.w.data[0] - 3; });
  }
};

int main() {
  fsdp::local::run(2, fsdp::host::Device{}, [](auto comm) {
    fsdp::Mesh mesh{std::move(comm)};
    fsdp::Engine engine{mesh, fsdp::FullShard{}};
    auto bowl = engine.shard(Bowl{}, "bowl");
    MomentumSgd sgd{engine};
    for (int step = 0; step < 100; ++step) bowl.forward(), bowl.backward(), sgd.step(0.1f);
    fsdp::export_full(engine, [](auto const&, auto w) { std::printf("w = %.3f\n", w[0]); });  // prints on rank 0 only
  });
}

// Output:
//   w = 3.000
