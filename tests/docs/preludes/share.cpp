// SPDX-License-Identifier: Apache-2.0
// Modules that share a tensor.
#include <cstdint>
#include <vector>

#include "examples/mlp/mlp.hpp"
#include "fsdp/comm/local.hpp"
#include "fsdp/host/device.hpp"

struct Embedding {
  std::int64_t width;
  template <class T>
  struct Params {
    fsdp::Tensor<T, 2> table;
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor("table", p.table, {width, width});
  }
};
using Head = Embedding;

using Comm = fsdp::local::Communicator<fsdp::host::Device>;
void share(fsdp::Engine<fsdp::FullShard, Comm>& engine, std::int64_t width,
           std::vector<mlp::Mlp<fsdp::host::Device>> blocks) {
  // BLOCK
}
