// SPDX-License-Identifier: Apache-2.0
// A result of backward that cannot be made without a call: backward below the lowest unit that trains has no result.
// expect: fsdp: backward returns void or a value that can be value-initialised
#include "fsdp/fsdp.hpp"
#include "model_communicator.hpp"

using Engine = fsdp::Engine<compile_fail::Communicator>;

struct Scale {
  std::int64_t n = 8;
  template <class T>
  struct Params {
    fsdp::Tensor<T, 1> weight;
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor("weight", p.weight, {n});
  }
  void forward(Engine::Stream&, Params<float const> const&) const {}
#ifdef CONTROL
  float const*
#else
  float const&
#endif
  backward(Engine::Stream&, Params<float const> const&, Params<float> const&, float const* x) const;
};
void use(fsdp::ShardedModule<Scale, Engine>& scale, float const* x) { scale.backward(x); }
