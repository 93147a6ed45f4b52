// SPDX-License-Identifier: Apache-2.0
// A module says what its parameters are, for every element type.
// expect: fsdp: the module has no member template <class T> struct Params
#include "fsdp/fsdp.hpp"
#include "model_communicator.hpp"

using Engine = fsdp::Engine<compile_fail::Communicator>;

struct Scale {
  std::int64_t n = 8;
#ifdef CONTROL
  template <class T>
  struct Params {
    fsdp::Tensor<T, 1> bias;
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor("bias", p.bias, {n});
  }
#else
  struct Params {
    fsdp::Tensor<float, 1> bias;
  };
  template <class Visit>
  void describe(Params& p, Visit&& tensor) const {
    tensor("bias", p.bias, {n});
  }
#endif
};
void use(Engine& engine) { engine.shard(Scale{}, "scale"); }
