// SPDX-License-Identifier: Apache-2.0
// This is the fully sharded trainer of smallest_mpi.cpp without fsdp: MPI calls gather weights and reduce gradients.
#define OMPI_SKIP_MPICXX 1  // Open MPI's C++ bindings are not used.
#include <mpi.h>

#include <cmath>
#include <cstdio>
#include <vector>

constexpr int width = 1001, depth = 2;
constexpr float lr = 0.02f, beta1 = 0.9f, beta2 = 0.999f, eps = 1e-8f, weight_decay = 0.01f;

struct Scale {                                            // y[k] = weight[k] x[k]
  std::vector<float> weight, gradient, moment1, moment2;  // this rank's shards
  explicit Scale(std::size_t shard) : weight(shard, 1.0f), gradient(shard), moment1(shard), moment2(shard) {}
  void forward(float const* w, float const* x, float* y) const {
    for (int k = 0; k < width; ++k) y[k] = w[k] * x[k];
  }
  void backward(float const* w, float* g, float const* x, float* dy) const {
    for (int k = 0; k < width; ++k) g[k] += dy[k] * x[k];
    for (int k = 0; k < width; ++k) dy[k] *= w[k];  // dy becomes the gradient of x.
  }
  std::vector<float> gather(int ranks) const {
    int const shard = static_cast<int>(weight.size());
    std::vector<float> full(weight.size() * static_cast<std::size_t>(ranks));
    MPI_Allgather(weight.data(), shard, MPI_FLOAT, full.data(), shard, MPI_FLOAT, MPI_COMM_WORLD);
    return full;
  }
  void reduce(std::vector<float> const& full, int ranks) {
    MPI_Reduce_scatter_block(full.data(), gradient.data(), static_cast<int>(gradient.size()), MPI_FLOAT, MPI_SUM,
                             MPI_COMM_WORLD);
    for (float& g : gradient) g /= static_cast<float>(ranks);
  }
  void adamw(int step) {
    auto const t = static_cast<float>(step);
    float const scale1 = 1.0f - std::pow(beta1, t), scale2 = 1.0f - std::pow(beta2, t);
    for (std::size_t i = 0; i < weight.size(); ++i) {
      moment1[i] = beta1 * moment1[i] + (1.0f - beta1) * gradient[i];
      moment2[i] = beta2 * moment2[i] + (1.0f - beta2) * gradient[i] * gradient[i];
      float const update = moment1[i] / scale1 / (std::sqrt(moment2[i] / scale2) + eps);
      weight[i] -= lr * (update + weight_decay * weight[i]);
    }
  }
};

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0, ranks = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  float x[depth + 1][width], dy[width];
  for (int k = 0; k < width; ++k) x[0][k] = static_cast<float>((3 * rank + k) % 7 - 3);
  // Shards must be equally long, so the last one has padding.
  std::vector<Scale> layers(depth, Scale(static_cast<std::size_t>((width + ranks - 1) / ranks)));
  for (int step = 0; step <= 40; ++step) {
    for (std::size_t i = 0; i < depth; ++i) {  // The full weights of one layer are in memory at a time.
      auto const full = layers[i].gather(ranks);
      layers[i].forward(full.data(), x[i], x[i + 1]);
    }
    double loss = 0.0;
    for (int k = 0; k < width; ++k) {  // The loss is the mean square of y - 2 x.
      dy[k] = 2.0f * (x[depth][k] - 2.0f * x[0][k]) / width;
      loss += dy[k] * dy[k] * width / 4.0f;
    }
    for (std::size_t i = depth; i-- > 0;) {
      auto const full = layers[i].gather(ranks);
      std::vector<float> full_gradient(full.size());
      layers[i].backward(full.data(), full_gradient.data(), x[i], dy);
      layers[i].reduce(full_gradient, ranks);
    }
    for (auto& layer : layers) layer.adamw(step + 1);
    MPI_Allreduce(MPI_IN_PLACE, &loss, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    if (rank == 0 && step % 40 == 0) std::printf("step %2d: loss %.4f\n", step, loss / ranks);
  }
  MPI_Finalize();
}
// Output:
//   step  0: loss 4.0000
//   step 40: loss 0.0484
