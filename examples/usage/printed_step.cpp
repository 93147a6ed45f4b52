// SPDX-License-Identifier: Apache-2.0
// This program prints the training step that an engine compiles for two units: the operations before and after the
// computation of each module (docs/extending.md explains the texts).
#include <iostream>
#include <utility>

#include "fsdp/fsdp.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"

/// A module, as far as the compiled step needs it: nothing calls forward or backward here.
struct Layer {
  template <class T>
  struct Params {
    fsdp::Tensor<T, 2> weight;
  };
  void describe(auto& params, auto&& tensor) const { tensor("weight", params.weight, {64, 64}); }
};

int main() {
  fsdp::local::run(2, fsdp::host::Device{}, [](auto comm) {
    fsdp::Mesh mesh{std::move(comm)};
    fsdp::Engine engine{mesh, fsdp::FullShard{}};
    auto lower = engine.shard(Layer{}, "lower");
    auto upper = engine.shard(Layer{}, "upper");
    engine.seal();  // compiles the step; without this call, the first forward or the optimizer does it
    // plain_step is a micro-step without gradient accumulation. Other flags print other kinds of micro-steps.
    if (engine.rank() == 0) std::cout << to_text(engine.program(), fsdp::plain_step);
  });
}

// Output:
//   forward    lower | all-gather lower->A, all-gather upper->B | close lower->A
//   forward    upper | |
//   backward   upper | all-gather lower->A, open upper->x | close upper->B, reduce-scatter upper, zero upper
//   backward   lower | open lower->y | close lower->A, reduce-scatter lower, zero lower
//   evaluation lower | all-gather lower->A, all-gather upper->B | close lower->A
//   evaluation upper | | close upper->B
