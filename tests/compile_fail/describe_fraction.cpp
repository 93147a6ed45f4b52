// SPDX-License-Identifier: Apache-2.0
// Extents are integers.
// expect: fsdp: a tensor's extents are integers
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
    tensor("weight", p.weight, {static_cast<int>(n), 0});
    tensor("bias", p.bias, {n});
  }
#else
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor("weight", p.weight, {n, 0.5 * n});
    tensor("bias", p.bias, {n});
  }
#endif
};
#ifdef CONTROL
static_assert(fsdp::ExtentList<3>{3, std::size_t{4}, std::int8_t{0}} == std::array<std::int64_t, 3>{3, 4, 0});
#endif
void use(Engine& engine) { engine.shard(Scale{}, "scale"); }
