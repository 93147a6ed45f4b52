// SPDX-License-Identifier: Apache-2.0
// This program trains a weight and a bias at different rates, and compares both with their exponential moving averages.
#include <cstdio>
#include <utility>

#include "fsdp/ema.hpp"
#include "fsdp/fsdp.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"

struct Linear {  // y = weight x + bias
  template <class T>
  struct Params {
    fsdp::Tensor<T, 1> weight, bias;
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor("weight", p.weight, {1});
    tensor("bias", p.bias, {1});
  }
  void forward(fsdp::host::Stream& stream, Params<float const> const& p, float x, float* y) const {
    stream.enqueue([=] { *y = p.weight.data[0] * x + p.bias.data[0]; });
  }
  void backward(fsdp::host::Stream& stream, Params<float const> const&, Params<float> const& g, float x, float const* y,
                float target) const {
    stream.enqueue([=] {
      g.weight.data[0] += (*y - target) * x;
      g.bias.data[0] += *y - target;
    });
  }
};

int main() {
  fsdp::local::run(2, fsdp::host::Device{}, [](auto comm) {
    float y = 0.0f;
    fsdp::Mesh mesh{std::move(comm)};
    fsdp::Engine engine{mesh, fsdp::FullShard{}};
    auto model = engine.shard(Linear{}, "model");
    fsdp::Sgd sgd{engine, {.lr = 0.2f}, {{.tensors = "*.bias", .lr_scale = 2.0f}}};  // biases train at rate 0.4
    fsdp::Ema ema{engine, 0.9f};
    auto const print = [&](char const* what) {  // for each tensor, on rank 0
      fsdp::export_full(engine, [=](auto& t, auto v) { std::printf("%s %s: %.2f\n", what, t.name.c_str(), v[0]); });
    };
    for (int step = 0; step < 100; ++step) {
      float const x = step % 2 == 0 ? 1.0f : -1.0f, noise = step % 4 < 2 ? 0.5f : -0.5f;
      model.forward(x, &y);
      model.backward(x, &y, 2.0f * x + 1.0f + noise);
      sgd.step();
      ema.update();
    }
    print("last");
    auto const averages = ema.swap();  // While this object lives, the model has the averages.
    print("average");
  });
}
// Output:
//   last model.weight: 1.98
//   last model.bias: 0.72
//   average model.weight: 1.99
//   average model.bias: 0.98
