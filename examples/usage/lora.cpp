// SPDX-License-Identifier: Apache-2.0
// This program trains LoRA adapters A and B beside a frozen matrix W, and prints that only A and B have moments.
#include <iostream>
#include <numeric>
#include <utility>

#include "fsdp/fsdp.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"

constexpr int width = 64, low = 2;

struct Adapted {                                 // y = W x + B A x
  static constexpr bool skips_gradients = true;  // backward writes no gradient of W, so W needs no memory for one.
  template <class T>
  struct Params {
    fsdp::Tensor<T, 2> w, a, b;
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor("w", p.w, {width, width}, fsdp::frozen);
    tensor("a", p.a, {low, width});
    tensor("b", p.b, {width, low}, fsdp::TensorOptions{.init = fsdp::init::zeros});
  }
  void forward(fsdp::host::Stream& stream, Params<float const> const& p, float const* x, float* ax, float* dy) const {
    stream.enqueue([=] {
      for (int i = 0; i < low; ++i) ax[i] = std::inner_product(x, x + width, p.a.data + i * width, 0.0f);
      for (int j = 0; j < width; ++j) dy[j] = std::inner_product(x, x + width, p.w.data + j * width, -1.0f);
      for (int i = 0; i < width * low; ++i) dy[i / low] += p.b.data[i] * ax[i % low];  // dy = y - 1
    });
  }
  void backward(fsdp::host::Stream& stream, Params<float const> const& p, Params<float> const& g, float const* x,
                float const* ax, float const* dy) const {
    stream.enqueue([=] {
      for (int i = 0; i < width * low; ++i) g.b.data[i] += dy[i / low] * ax[i % low];
      for (int i = 0; i < width * low; ++i)
        for (int k = 0; k < width; ++k) g.a.data[i % low * width + k] += dy[i / low] * p.b.data[i] * x[k];
    });
  }
};

int main() {
  fsdp::local::run(2, fsdp::host::Device{}, [](auto comm) {
    float x[width] = {1.0f, 2.0f, 3.0f}, ax[low], dy[width];
    fsdp::Mesh mesh{std::move(comm)};
    fsdp::Engine engine{mesh, fsdp::FullShard{}};
    auto layer = engine.shard(Adapted{}, "layer");
    fsdp::AdamW adamw{engine, {.lr = 0.01f}};
    for (int step = 0; step < 40; ++step) {
      layer.forward(x, ax, dy);
      layer.backward(x, ax, dy);
      adamw.step();
    }
    auto const moments = engine.account().reserved(fsdp::MemoryTag::optimizer);
    if (engine.rank() == 0) std::cout << to_text(engine.shards()) << moments << " bytes of moments on each rank\n";
  });
}
// Output:
//   unit 'layer': full_shard over 2; 256 elements, padded to 256; rank 0: 0 to 128
//   unit 'layer (frozen)': full_shard over 2, frozen; 4096 elements, padded to 4096; rank 0: 0 to 2048
//   1024 bytes of moments on each rank
