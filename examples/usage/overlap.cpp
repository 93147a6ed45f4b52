// SPDX-License-Identifier: Apache-2.0
// This program simulates and traces steps, and prints the exposed time, in which compute waits for communication.
#include <iostream>
#include <utility>
#include <vector>

#include "fsdp/fsdp.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"
#include "fsdp/simulate.hpp"
#include "fsdp/trace.hpp"

constexpr int width = 32768, rows = 8, depth = 6;

struct Bias {  // y[r, k] = x[r, k] + bias[k], so the gradient of x is that of y
  template <class T>
  struct Params {
    fsdp::Tensor<T, 1> bias;
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor("bias", p.bias, {width});
  }
  void forward(fsdp::host::Stream& stream, Params<float const> const& p, float const* x, float* y) const {
    stream.enqueue([=] {
      for (int i = 0; i < rows * width; ++i) y[i] = x[i] + p.bias.data[i % width];
    });
  }
  void backward(fsdp::host::Stream& stream, Params<float const> const&, Params<float> const& g, float const* dy) const {
    stream.enqueue([=] {
      for (int i = 0; i < rows * width; ++i) g.bias.data[i % width] += dy[i];
    });
  }
};

int main() {
  for (int prefetch : {0, 1})
    fsdp::local::run(2, fsdp::host::Device{}, [&](auto comm) {
      std::vector<std::vector<float>> x(depth + 1, std::vector<float>(rows * width, 1.0f));
      fsdp::Mesh mesh{std::move(comm)};
      fsdp::Engine engine{mesh, fsdp::FullShard{}, {.prefetch = prefetch}};
      auto layers = engine.shard(std::vector<Bias>(depth), "layers");
      fsdp::AdamW adamw{engine};
      engine.start_trace(1000);  // at most 1000 spans
      for (int step = 0; step < 5; ++step) {
        for (std::size_t i = 0; i < depth; ++i) layers[i].forward(x[i].data(), x[i + 1].data());
        for (std::size_t i = depth; i-- > 0;) layers[i].backward(x[depth].data());  // loss: y^2 / 2
        adamw.step();
      }
      auto const traced = fsdp::overlap_report(engine.stop_trace());
      fsdp::Costs costs;  // The simulated forward takes 2 units of time, backward 4, and a collective 1.
      costs[fsdp::step::Primitive::forward].fixed = 2, costs[fsdp::step::Primitive::backward].fixed = 4;
      costs[fsdp::step::Primitive::all_gather].fixed = costs[fsdp::step::Primitive::reduce_scatter].fixed = 1;
      auto const exposed = fsdp::simulate(engine.program(), costs).end() - 6 * depth;
      if (engine.rank() == 0)
        std::cout << fsdp::formatted("prefetch {}: simulated {} exposed; {}\n", prefetch, exposed, summary(traced));
    });
}
// Output:
//   prefetch 0: simulated 12 exposed; 5 steps of ... ms: ...; exposed ... ms (... %): ...
//   prefetch 1: simulated 2 exposed; 5 steps of ... ms: ...; exposed ... ms (... %): ...
