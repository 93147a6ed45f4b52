// SPDX-License-Identifier: Apache-2.0
// Wrong arguments of backward.
// expect: backward_arguments.cpp:[0-9]+:.*(required from here|instantiation)
// expect: candidate expects 4 arguments, 5 provided|expected 4, have 5
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
  scale.backward(x);
#else
  scale.backward(x, y);
#endif
}
