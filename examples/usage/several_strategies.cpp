// SPDX-License-Identifier: Apache-2.0
// The units of this model have three sharding strategies, and the program prints how much memory each unit takes on
// each of two ranks.
#include <iostream>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/fsdp.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"

constexpr int width = 1024;

/// A module: x = x + w, element by element.
struct Shift {
  template <class T>
  struct Params {
    fsdp::Tensor<T, 1> w;
  };
  void describe(auto& params, auto&& tensor) const { tensor("w", params.w, {width}); }
  void forward(fsdp::host::Stream& stream, Params<float const> const& p, float* x) const {
    stream.enqueue([=] {
      for (int i = 0; i < width; ++i) x[i] += p.w.data[i];
    });
  }
};

int main() {
  fsdp::local::run(2, fsdp::host::Device{}, [](auto comm) {
    std::vector<float> x(width);
    fsdp::Mesh mesh{std::move(comm)};
    fsdp::Engine engine{mesh, fsdp::FullShard{}};  // the strategy of units that get no other
    auto body = engine.shard(std::vector(2, Shift{}), "body");
    auto gate = engine.shard(Shift{}, "gate", fsdp::ShardGradOp{});  // stays gathered from forward to backward
    auto head = engine.shard(Shift{}, "head", fsdp::NoShard{});      // whole on every rank
    fsdp::AdamW adamw{engine};                                       // now all memory is reserved

    auto const print = [&](std::string_view what, std::string_view strategy, auto bytes) {
      if (engine.rank() == 0) std::cout << fsdp::formatted("{:26}{:14}{:6} bytes\n", what, strategy, bytes);
    };
    auto const shards = engine.shards();
    for (std::size_t u = 0; u < shards.size(); ++u)  // 4 fp32 values: parameter, gradient, two moments
      print(shards[u].name(), shards[u].strategy().name, shards[u].shard_numel() * 4 * 4);
    print("these and shared buffers", "", engine.account().reserved_state());
    for (auto& layer : body) layer.forward(x.data());
    gate.forward(x.data()), head.forward(x.data());
    // These are the gate, and body.1: the last unit of FullShard stays gathered, because backward needs it soon.
    print("gathered after forward", "", engine.account().live(fsdp::MemoryTag::gather));
  });
}

// Output:
//   body.0                    full_shard      8192 bytes
//   body.1                    full_shard      8192 bytes
//   gate                      shard_grad_op   8192 bytes
//   head                      no_shard       16384 bytes
//   these and shared buffers                 61440 bytes
//   gathered after forward                    8192 bytes
