// SPDX-License-Identifier: Apache-2.0
// describe sets the tensors of the Params that it is given.
// expect: fsdp: the module's describe takes a copy of its Params
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
    tensor("weight", p.weight, {n, n});
    tensor("bias", p.bias, {n});
  }
#else
  template <class T, class Visit>
  void describe(Params<T> p, Visit&& tensor) const {
    tensor("weight", p.weight, {n, n});
    tensor("bias", p.bias, {n});
  }
#endif
};
void use(Engine& engine) { engine.shard(Scale{}, "scale"); }
