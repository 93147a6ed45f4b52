// SPDX-License-Identifier: Apache-2.0
// An optimizer that cannot be one of several is told which members it needs.
// expect: fsdp: an optimizer of Optimizers has members owns, name, begin_step and update: see OptimizerPart
#include "fsdp/fsdp.hpp"
#include "fsdp/optimizers.hpp"
#include "model_communicator.hpp"

using Engine = fsdp::Engine<compile_fail::Communicator>;
struct Mine {
  static std::string_view name() { return "Mine"; }
  bool owns(fsdp::TensorInfo const&) const { return true; }
  void begin_step(float, fsdp::ClipScalars const*) {}
#ifdef CONTROL
  void update(Engine::Unit&) {}
#endif
};
void use(Engine& engine, Mine& mine) {
  fsdp::AdamW adamw{engine, fsdp::matching("h.*")};
  fsdp::Optimizers both{adamw, mine};
}
