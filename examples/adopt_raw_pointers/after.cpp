// SPDX-License-Identifier: Apache-2.0
// The trainer of before.cpp on two ranks: each rank keeps half of the parameters, gradients and moments.
#include <cstdio>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/fsdp.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"
#include "kernels.hpp"

using Comm = fsdp::local::Communicator<fsdp::host::Device>;
using Engine = fsdp::Engine<Comm>;

void train(Comm comm) {
  std::int64_t const rows = batch / comm.size(), first_row = comm.rank() * rows;
  fsdp::Mesh mesh(std::move(comm));
  auto compute = fsdp::host::Stream::inline_stream("compute");  // the kernels run on this thread
  Engine engine(mesh, fsdp::FullShard{}, {}, compute);
  std::vector<fsdp::AdoptedUnit<Engine>> units;
  Layer w[depth], g[depth];
  for (std::int64_t l = 0; l < depth; ++l) {
    auto const name = std::to_string(l);
    units.push_back({engine,
                     name,
                     {{name + ".weight", &w[l].weight, &g[l].weight, {width, width}},
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
    if (step % 50 == 0 && engine.rank() == 0) std::printf("step %d: loss %.5f\n", step, loss);
  }
}

int main() {
  fsdp::local::run(2, fsdp::host::Device{}, [](Comm comm) { train(std::move(comm)); });
}
