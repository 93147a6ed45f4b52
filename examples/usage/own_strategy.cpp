// SPDX-License-Identifier: Apache-2.0
// A sharding strategy of your own shards large units over the ranks, and lets every rank keep small units whole.
#include <iostream>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/fsdp.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"

/// A strategy has these three members. Here, two of them depend on the unit.
struct ShardLarge {
  static constexpr std::string_view name = "shard_large";
  bool shards;                  // false: every rank keeps all parameters of the unit
  bool reshards_after_forward;  // true: gathered parameters are dropped after forward, and gathered again for backward

  explicit ShardLarge(int elements) : shards(elements > 1000), reshards_after_forward(shards) {}
};
static_assert(fsdp::Strategy<ShardLarge>);

/// A module: x = x + w, element by element.
struct Shift {
  int size;

  template <class T>
  struct Params {
    fsdp::Tensor<T, 1> w;
  };
  void describe(auto& params, auto&& tensor) const { tensor("w", params.w, {size}); }
  void forward(fsdp::host::Stream& stream, Params<float const> const& p, float* x) const {
    stream.enqueue([=, *this] {
      for (int i = 0; i < size; ++i) x[i] += p.w.data[i];
    });
  }
};

int main() {
  fsdp::local::run(2, fsdp::host::Device{}, [](auto comm) {
    std::vector<float> x(4096);  // before the engine, whose destructor waits for its tasks
    fsdp::Mesh mesh{std::move(comm)};
    fsdp::Engine engine{mesh, fsdp::FullShard{}};
    auto norm = engine.shard(Shift{64}, "norm", ShardLarge{64});
    auto body = engine.shard(Shift{4096}, "body", ShardLarge{4096});
    norm.forward(x.data()), body.forward(x.data());
    auto const shards = engine.shards();
    for (std::size_t u = 0; u < shards.size(); ++u)
      if (engine.rank() == 0)
        std::cout << fsdp::formatted("{}: this rank keeps {} of {} parameters\n", shards[u].name(),
                                     shards[u].shard_numel(), shards[u].full_numel());
  });
}

// Output:
//   norm: this rank keeps 64 of 64 parameters
//   body: this rank keeps 2048 of 4096 parameters
