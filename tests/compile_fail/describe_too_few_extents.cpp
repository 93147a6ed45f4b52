// SPDX-License-Identifier: Apache-2.0
// A tensor of rank 2 has two extents: one is no shape.
// expect: fsdp: describe gives a tensor another number of extents than its rank
// expect: describe_too_few_extents.cpp:[0-9]+:
// lines: 25
#include "fsdp/fsdp.hpp"
#include "model_communicator.hpp"

using Engine = fsdp::Engine<compile_fail::Communicator>;

struct Scale {
  std::int64_t n = 8;
  template <class T>
  struct Params {
    fsdp::Tensor<T, 2> weight;
    fsdp::Tensor<T, 1> bias;
  };
#ifdef CONTROL
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor("weight", p.weight, std::array<std::int64_t, 2>{n, n});
    tensor("bias", p.bias, {n});
  }
#else
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor("weight", p.weight, {n});
    tensor("bias", p.bias, {n});
  }
#endif
};
void use(Engine& engine) { engine.shard(Scale{}, "scale"); }
