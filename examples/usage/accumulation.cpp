// SPDX-License-Identifier: Apache-2.0
// This loop adds up gradients over micro-steps, reduces them over ranks in the last one only, and clips their norm.
#include <cstdio>
#include <utility>

#include "fsdp/fsdp.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"

using fsdp::host::Device, fsdp::host::Stream;

/// A module: the line y = slope * x + offset.
struct Line {
  template <class T>
  struct Params {
    fsdp::Tensor<T, 1> slope, offset;
  };
  void describe(auto& params, auto&& tensor) const {
    tensor("slope", params.slope, {1}, fsdp::no_decay);
    tensor("offset", params.offset, {1}, fsdp::no_decay);
  }
  void forward(Stream& stream, Params<float const> const& p, float x, float* y) const {
    stream.enqueue([=] { *y = p.slope.data[0] * x + p.offset.data[0]; });
  }
  void backward(Stream& stream, Params<float const> const&, Params<float> const& g, float x, float const* dy) const {
    stream.enqueue([=] { g.slope.data[0] += *dy * x, g.offset.data[0] += *dy; });
  }
};

void train(fsdp::local::Communicator<Device> comm) {
  constexpr int micro_steps = 4;
  float y = 0, dy = 0;
  fsdp::Mesh mesh{std::move(comm)};
  fsdp::Engine engine{mesh, fsdp::FullShard{}, {.allow_no_sync = true}};  // reserves memory for full gradients
  auto line = engine.shard(Line{}, "line");
  fsdp::Sgd sgd{engine, {.lr = 0.2f}};

  for (int step = 0; step <= 20; ++step) {
    for (int micro = 0; micro < micro_steps; ++micro) {
      auto const scope = engine.no_sync(micro + 1 < micro_steps);  // the last micro-step reduces the sum
      auto const x = static_cast<float>(((step * micro_steps + micro) * 2 + engine.rank()) % 7 - 3);
      line.forward(x, &y);
      // The loss is (y - target)^2 / 2, and the target is 2 x + 1. The division makes a mean over micro-steps.
      engine.compute().enqueue([&y, &dy, x] { dy = (y - (2 * x + 1)) / micro_steps; });
      line.backward(x, &dy);
    }
    auto const norm = fsdp::clip_grad_norm(engine, 1.0f);  // of the gradients of all units
    sgd.step(norm);                                        // scales the gradients to norm 1 if theirs is larger
    if (step % 10 != 0) continue;
    double const value = norm.value();  // before clipping; waits until it is computed
    if (engine.rank() == 0) std::printf("step %2d: gradient norm %.2f\n", step, value);
  }
}

int main() { fsdp::local::run(2, Device{}, train); }

// Output:
//   step  0: gradient norm 8.88
//   step 10: gradient norm 0.61
//   step 20: gradient norm 0.06
