// SPDX-License-Identifier: Apache-2.0
// A unit is named by what add_unit returned, and may have a strategy of its own.
// expect: fsdp: not a UnitId, nor a strategy
// lines: 50
#include "fsdp/fsdp.hpp"
#include "model_communicator.hpp"

using Engine = fsdp::Engine<compile_fail::Communicator>;

struct Scale {
  template <class T>
  struct Params {
    fsdp::Tensor<T, 1> factor;
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& visit) const {
    visit("factor", p.factor, {8});
  }
};
#ifdef CONTROL
void use(Engine& engine) { engine.shard(Scale{}, "scale", fsdp::NoShard{}); }
#else
void use(Engine& engine) { engine.shard(Scale{}, "scale", 0); }
#endif
