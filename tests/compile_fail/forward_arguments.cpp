// SPDX-License-Identifier: Apache-2.0
// A forward that is called with other arguments than it takes: where, and what it takes.
// expect: forward_arguments.cpp:[0-9]+:.*(required from here|instantiation)
// expect: candidate expects 4 arguments, 3 provided|expected 4, have 3
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
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor("weight", p.weight, {n, n});
    tensor("bias", p.bias, {n});
  }
  void forward(Engine::Stream&, Params<float const> const&, float const*, float*) const {}
  void backward(Engine::Stream&, Params<float const> const&, Params<float> const&, float const*) const {}
};
void use(fsdp::ShardedModule<Scale, Engine>& scale, float const* x, float* y) {
#ifdef CONTROL
  scale.forward(x, y);
#else
  scale.forward(x);
#endif
}
