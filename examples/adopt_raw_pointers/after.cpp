// SPDX-License-Identifier: Apache-2.0
// The same trainer on two ranks, each of which keeps half of the parameters, gradients and moments.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/comm/local.hpp"
#include "fsdp/fsdp.hpp"
#include "fsdp/host/device.hpp"

constexpr std::int64_t width = 16, depth = 4, batch = 48;
constexpr float rate = 3e-3f, beta1 = 0.9f, beta2 = 0.999f, eps = 1e-8f, decay = 0.01f;

struct Layer {
  float* weight;  // (width, width)
  float* bias;    // (width)
};

// Both the inputs and the initial weights are a function of where they stand.
float noise(std::int64_t seed, std::int64_t i) {
  auto bits = static_cast<std::uint32_t>(seed * 7919 + i) * 2654435761u;
  bits = (bits ^ (bits >> 15)) * 2246822519u;
  return static_cast<float>((bits ^ (bits >> 13)) >> 8) * 0x1p-23f - 1.0f;
}

// y = x + tanh(x weight^T + bias)
void forward(Layer const& w, float const* x, float* y, std::int64_t rows) {
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t j = 0; j < width; ++j) {
      float sum = w.bias[j];
      for (std::int64_t k = 0; k < width; ++k) sum += x[r * width + k] * w.weight[j * width + k];
      y[r * width + j] = x[r * width + j] + std::tanh(sum);
    }
}

// g += gradients; d goes from the gradient of y to that of x
void backward(Layer const& w, Layer const& g, float const* x, float const* y, float* d, std::int64_t rows) {
  for (std::int64_t r = 0; r < rows; ++r) {
    float before[width];
    for (std::int64_t j = 0; j < width; ++j) {
      float const t = y[r * width + j] - x[r * width + j];
      before[j] = d[r * width + j] * (1.0f - t * t);
      g.bias[j] += before[j];
      for (std::int64_t k = 0; k < width; ++k) g.weight[j * width + k] += before[j] * x[r * width + k];
    }
    for (std::int64_t j = 0; j < width; ++j)
      for (std::int64_t k = 0; k < width; ++k) d[r * width + k] += before[j] * w.weight[j * width + k];
  }
}

// Mean square of y - target, and its gradient
double compare(float const* y, float const* target, float* d, std::int64_t elements) {
  double loss = 0.0;
  for (std::int64_t i = 0; i < elements; ++i) {
    float const difference = y[i] - target[i];
    loss += static_cast<double>(difference) * static_cast<double>(difference) / static_cast<double>(elements);
    d[i] = 2.0f * difference / static_cast<float>(elements);
  }
  return loss;
}

using Comm = fsdp::local::Communicator<fsdp::host::Device>;
using Engine = fsdp::Engine<fsdp::FullShard, Comm>;

void train(Comm comm) {
  std::int64_t const rows = batch / comm.size(), first_row = comm.rank() * rows;
  fsdp::Mesh<Comm> mesh(std::move(comm));
  auto compute = fsdp::host::Stream::inline_stream("compute");  // the kernels run on this thread
  Engine engine(mesh, {}, compute);
  std::vector<fsdp::AdoptedUnit<Engine>> units;
  Layer w[depth], g[depth];
  for (std::int64_t l = 0; l < depth; ++l) {
    auto const name = std::to_string(l);
    units.push_back({engine, name, {{name + ".weight", &w[l].weight, &g[l].weight, {width, width}},
                                    {name + ".bias", &w[l].bias, &g[l].bias, {width}, fsdp::no_decay}}});
  }
  fsdp::import_shard(engine, [](fsdp::TensorInfo const& tensor, std::int64_t first, std::span<float> out) {
    bool const weight = tensor.name.ends_with("weight");
    for (auto& value : out) value = weight ? 0.3f * noise(std::stoi(tensor.name), first++) : 0.0f;
  });
  fsdp::AdamW adamw(engine, {.lr = rate, .beta1 = beta1, .beta2 = beta2, .eps = eps, .weight_decay = decay});

  std::vector<std::vector<float>> x(depth + 1, std::vector<float>(static_cast<std::size_t>(rows * width)));
  auto target = x[0], d = x[0];
  for (std::int64_t i = 0; i < rows * width; ++i) {
    x[0][static_cast<std::size_t>(i)] = noise(100, first_row * width + i);
    target[static_cast<std::size_t>(i)] = std::sin(3.0f * noise(100, first_row * width + i));
  }

  for (int step = 1; step <= 200; ++step) {
    for (std::size_t l = 0; l < depth; ++l) {
      auto full = units[l].forward();
      forward(w[l], x[l].data(), x[l + 1].data(), rows);
    }
    double loss = compare(x[depth].data(), target.data(), d.data(), rows * width);
    for (std::size_t l = depth; l-- > 0;) {
      auto full = units[l].backward();
      backward(w[l], g[l], x[l].data(), x[l + 1].data(), d.data(), rows);
    }
    adamw.step();
    loss = engine.mean_over_ranks({loss})[0];
    if (step % 20 == 0 && engine.rank() == 0) std::printf("step %d: loss %.5f\n", step, loss);
  }
}

int main() {
  fsdp::local::run(2, fsdp::host::Device{}, [](Comm comm) { train(std::move(comm)); });
}
