// SPDX-License-Identifier: Apache-2.0
// This program prints the peak memory of a model on each rank, for several strategies and numbers of ranks; it starts
// no ranks, needs no device and allocates none of this memory.
#include <iostream>
#include <vector>

#include "fsdp/plan.hpp"

/// A module, as far as a plan needs it: a plan calls neither forward nor backward.
struct Block {
  int width;

  template <class T>
  struct Params {
    fsdp::Tensor<T, 2> up, down;
  };
  void describe(auto& params, auto&& tensor) const {
    tensor("up", params.up, {4 * width, width});
    tensor("down", params.down, {width, 4 * width});
  }
};

void print_plan(int ranks, fsdp::ShardingStrategy const& strategy) {
  fsdp::plan::Declaration<fsdp::Bf16> declared(ranks, strategy, {.prefetch = 1});  // arguments as those of an engine
  declared.shard(std::vector(48, Block{4096}), "blocks");                          // 6.4 billion parameters
  fsdp::MemoryPlan const plan = fsdp::memory_plan(declared.input());               // for AdamW
  auto const gib = [](auto bytes) { return static_cast<double>(bytes) / (1 << 30); };
  std::cout << fsdp::formatted("{:5}  {:14}{:7.2f}{:9.2f}{:9.2f}{:9.2f}\n", ranks, strategy.name, gib(plan.rest()),
                               gib(plan.live_forward), gib(plan.live_backward), gib(plan.reserved()));
}

int main() {
  std::cout << "ranks  strategy       state  forward backward reserved  (GiB on each rank, without activations)\n";
  for (int const ranks : {8, 64}) {
    print_plan(ranks, fsdp::FullShard{});
    print_plan(ranks, fsdp::ShardGradOp{});
    print_plan(ranks, fsdp::NoShard{});
  }
}

// Output:
//   ranks  strategy       state  forward backward reserved  (GiB on each rank, without activations)
//       8  full_shard      12.00    12.50    13.50    13.50
//       8  shard_grad_op   12.00    24.00    24.75    25.00
//       8  no_shard        96.00   108.00   108.00   108.00
//      64  full_shard       1.50     2.00     3.00     3.00
//      64  shard_grad_op    1.50    13.50    14.25    14.50
//      64  no_shard        96.00   108.00   108.00   108.00
