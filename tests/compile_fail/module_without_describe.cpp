// SPDX-License-Identifier: Apache-2.0
// A module that does not name its tensors cannot be sharded.
// expect: module\.describe\(|M = Silent\]: constraints not satisfied
#include "fsdp/fsdp.hpp"
#include "model_communicator.hpp"

struct Silent {
  template <class T>
  struct Params {
    fsdp::Tensor<T, 1> scale;
  };
#ifdef CONTROL
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor("scale", p.scale, {8});
  }
#endif
};
void use(fsdp::Engine<fsdp::FullShard, compile_fail::Communicator>& engine) { engine.shard(Silent{}, "silent"); }
