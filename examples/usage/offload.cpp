// SPDX-License-Identifier: Apache-2.0
// This program keeps moments, master weights and gradients in host memory, and prints the device memory it saves.
#include <iostream>
#include <utility>
#include <vector>

#include "fsdp/fsdp.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"
#include "fsdp/offload.hpp"

constexpr int width = 4096, depth = 12;

struct Scale {  // y[k] = weight[k] x[k]
  template <class T>
  struct Params {
    fsdp::Tensor<T, 1> weight;
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor("weight", p.weight, {width}, fsdp::TensorOptions{.init = fsdp::init::ones});
  }
  void forward(fsdp::host::Stream& stream, Params<fsdp::bf16 const> const& p, float const* x, float* y) const {
    stream.enqueue([=] {
      for (int k = 0; k < width; ++k) y[k] = float(p.weight.data[k]) * x[k];
    });
  }
  void backward(fsdp::host::Stream& stream, Params<fsdp::bf16 const> const& p, Params<float> const& g, float const* x,
                float* dy) const {
    stream.enqueue([=] {
      for (int k = 0; k < width; ++k) g.weight.data[k] += dy[k] * x[k];
      for (int k = 0; k < width; ++k) dy[k] *= float(p.weight.data[k]);  // dy becomes the gradient of x.
    });
  }
};

void train(fsdp::local::Communicator<fsdp::host::Device> comm, bool offloads) {
  std::vector<std::vector<float>> x(depth + 1, std::vector<float>(width, 1.0f));
  fsdp::Mesh mesh{std::move(comm)};
  fsdp::Engine engine{mesh, fsdp::FullShard{}, fsdp::Bf16{}};
  auto layers = engine.shard(std::vector<Scale>(depth), "layers");
  if (offloads) fsdp::offload(engine, {.moments = true, .masters = true, .gradients = true});  // before the optimizer
  fsdp::AdamW adamw{engine};
  for (int step = 0; step < 10; ++step) {
    for (std::size_t i = 0; i < depth; ++i) layers[i].forward(x[i].data(), x[i + 1].data());
    for (std::size_t i = depth; i-- > 0;) layers[i].backward(x[i].data(), x[depth].data());  // of the loss y^2 / 2
    adamw.step();
  }
  auto const device = engine.account().reserved_state(), host = engine.account().reserved(fsdp::MemoryTag::offloaded);
  if (engine.rank() == 0)
    std::cout << fsdp::formatted("{:6} bytes of device memory, {:6} of host memory\n", device, host);
}

int main() {
  fsdp::local::run(2, fsdp::host::Device{}, [](auto comm) { train(std::move(comm), false); });
  fsdp::local::run(2, fsdp::host::Device{}, [](auto comm) { train(std::move(comm), true); });
}
// Output:
//   442368 bytes of device memory,      0 of host memory
//   163840 bytes of device memory, 393216 of host memory
