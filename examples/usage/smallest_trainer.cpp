// SPDX-License-Identifier: Apache-2.0
// The smallest trainer has two ranks, which are threads, and shards parameters, gradients and optimizer state.
#include <cstdio>
#include <utility>
#include <vector>

#include "fsdp/fsdp.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"

using fsdp::host::Device, fsdp::host::Stream;
constexpr int width = 64, depth = 4;

/// A module: y = w * x + b, element by element. It computes, and contains no communication.
struct Layer {
  template <class T>
  struct Params {
    fsdp::Tensor<T, 1> w, b;
  };
  void describe(auto& params, auto&& tensor) const {  // names each tensor once, with its shape
    tensor("w", params.w, {width}, fsdp::TensorOptions{.init = fsdp::init::ones});
    tensor("b", params.b, {width}, fsdp::no_decay);  // starts at zero
  }
  void forward(Stream& stream, Params<float const> const& p, float const* x, float* y) const {
    stream.enqueue([=] {  // the stream runs this after the parameters are gathered
      for (int i = 0; i < width; ++i) y[i] = p.w.data[i] * x[i] + p.b.data[i];
    });
  }
  /// Adds to the gradients of the parameters. d holds the gradient of y, and afterwards that of x.
  void backward(Stream& stream, Params<float const> const& p, Params<float> const& g, float const* x, float* d) const {
    stream.enqueue([=] {
      for (int i = 0; i < width; ++i) {
        g.w.data[i] += d[i] * x[i];
        g.b.data[i] += d[i];
        d[i] *= p.w.data[i];
      }
    });
  }
};

void train(fsdp::local::Communicator<Device> comm) {
  float x[depth + 1][width], d[width], loss = 0;  // before the engine, whose destructor waits for its tasks
  fsdp::Mesh mesh{std::move(comm)};
  fsdp::Engine engine{mesh, fsdp::FullShard{}};
  auto layers = engine.shard(std::vector(depth, Layer{}), "layers");
  fsdp::AdamW adamw{engine, {.lr = 0.01f}};

  for (int step = 0; step <= 20; ++step) {
    engine.compute().enqueue([&x, sample = 2 * step + engine.rank()] {  // each rank has samples of its own
      for (int i = 0; i < width; ++i) x[0][i] = static_cast<float>((7 * i + 5 * sample) % 11) / 5 - 1;
    });
    for (std::size_t l = 0; l < depth; ++l) layers[l].forward(x[l], x[l + 1]);
    engine.compute().enqueue([&x, &d, &loss] {  // the loss is the mean of (y - target)^2, and the target is 2 x + 1
      loss = 0;
      for (int i = 0; i < width; ++i) {
        float const difference = x[depth][i] - (2 * x[0][i] + 1);
        loss += difference * difference / width;
        d[i] = 2 * difference / width;
      }
    });
    for (std::size_t l = depth; l-- > 0;) layers[l].backward(x[l], d);
    adamw.step();  // with gradients that are averaged over the ranks
    if (step % 10 != 0) continue;
    engine.synchronize();  // waits until the stream has computed the loss
    auto const mean = engine.mean_over_ranks({loss})[0];
    if (engine.rank() == 0) std::printf("step %2d: loss %.3f\n", step, mean);
  }
}

int main() { fsdp::local::run(2, Device{}, train); }

// Output:
//   step  0: loss 1.392
//   step 10: loss 0.474
//   step 20: loss 0.027
