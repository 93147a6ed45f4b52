// SPDX-License-Identifier: Apache-2.0
// A sharded module is one use of a unit: it moves, it is not copied.
// expect: use of deleted function|call to implicitly-deleted|deleted copy constructor
#include <utility>

#include "fsdp/fsdp.hpp"
#include "model_communicator.hpp"

struct Scale {
  template <class T>
  struct Params {
    fsdp::Tensor<T, 1> scale;
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor("scale", p.scale, {8});
  }
};
using Engine = fsdp::Engine<compile_fail::Communicator>;
using Sharded = fsdp::ShardedModule<Scale, Engine>;
void use(Sharded& module) {
#ifdef CONTROL
  Sharded other(std::move(module));
#else
  Sharded other(module);
#endif
}
