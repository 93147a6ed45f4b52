// SPDX-License-Identifier: Apache-2.0
// Modules in a vector are refused like one.
// expect: fsdp: the module's describe must be const
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
    tensor("weight", p.weight, {n, n});
    tensor("bias", p.bias, {n});
  }
#else
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) {
    tensor("weight", p.weight, {n, n});
    tensor("bias", p.bias, {n});
  }
#endif
};
void use(Engine& engine) { engine.shard(std::vector(3, Scale{}), "scales"); }
