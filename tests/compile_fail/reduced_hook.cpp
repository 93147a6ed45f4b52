// SPDX-License-Identifier: Apache-2.0
// A function for reduced gradients that cannot be called.
// expect: fsdp: on_reduced takes a function f\(Device::Stream&, std::span<float>\)
#include "fsdp/fsdp.hpp"
#include "model_communicator.hpp"

using Engine = fsdp::Engine<compile_fail::Communicator>;
void use(Engine& engine, fsdp::UnitId unit) {
#ifdef CONTROL
  engine.shards().on_reduced(unit, [](Engine::Stream&, std::span<float>) {});
#else
  engine.shards().on_reduced(unit, [](std::span<float>) {});
#endif
}
