// SPDX-License-Identifier: Apache-2.0
// This is the trainer of plain_mpi.cpp with fsdp, which does what that program writes in MPI calls.
#include <cstdio>
#include <vector>

#include "fsdp/fsdp.hpp"
#include "fsdp/mpi.hpp"

constexpr int width = 1001, depth = 2;

struct Scale {  // y[k] = weight[k] x[k]
  template <class T>
  struct Params {
    fsdp::Tensor<T, 1> weight;
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor("weight", p.weight, {width}, fsdp::TensorOptions{.init = fsdp::init::ones});
  }
  void forward(fsdp::host::Stream& stream, Params<float const> const& p, float const* x, float* y) const {
    stream.enqueue([=] {
      for (int k = 0; k < width; ++k) y[k] = p.weight.data[k] * x[k];
    });
  }
  void backward(fsdp::host::Stream& stream, Params<float const> const& p, Params<float> const& g, float const* x,
                float* dy) const {
    stream.enqueue([=] {
      for (int k = 0; k < width; ++k) g.weight.data[k] += dy[k] * x[k];
      for (int k = 0; k < width; ++k) dy[k] *= p.weight.data[k];  // dy becomes the gradient of x.
    });
  }
};

int main(int argc, char** argv) {
  return fsdp::mpi::run(argc, argv, [](fsdp::mpi::Environment& environment) {
    float x[depth + 1][width], dy[width];
    for (int k = 0; k < width; ++k) x[0][k] = static_cast<float>((3 * environment.rank() + k) % 7 - 3);
    fsdp::Mesh mesh{fsdp::mpi::Communicator{environment}};
    fsdp::Engine engine{mesh, fsdp::FullShard{}};
    auto layers = engine.shard(std::vector<Scale>(depth), "layers");
    fsdp::AdamW adamw{engine, {.lr = 0.02f}};
    for (int step = 0; step <= 40; ++step) {
      for (std::size_t i = 0; i < depth; ++i) layers[i].forward(x[i], x[i + 1]);
      engine.synchronize();
      double loss = 0.0;
      for (int k = 0; k < width; ++k) {  // The loss is the mean square of y - 2 x.
        dy[k] = 2.0f * (x[depth][k] - 2.0f * x[0][k]) / width;
        loss += dy[k] * dy[k] * width / 4.0f;
      }
      for (std::size_t i = depth; i-- > 0;) layers[i].backward(x[i], dy);
      adamw.step();
      loss = engine.mean_over_ranks({loss})[0];
      if (engine.rank() == 0 && step % 40 == 0) std::printf("step %2d: loss %.4f\n", step, loss);
    }
    return 0;
  });
}
// Output:
//   step  0: loss 4.0000
//   step 40: loss 0.0484
