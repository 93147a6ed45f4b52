// SPDX-License-Identifier: Apache-2.0
// A misspelt option is named as what it is.
// expect: \.kernels_enqueued
// expect: fsdp: expected \(engine, name, tensors\[, AdoptedOptions\]\); check the names in braces
#include "fsdp/fsdp.hpp"
#include "model_communicator.hpp"

using Engine = fsdp::Engine<compile_fail::Communicator>;
void use(Engine& engine, float* weight, float* gradient) {
#ifdef CONTROL
  fsdp::AdoptedUnit<Engine> unit(engine, "unit", {{"weight", &weight, &gradient, {8}}}, {.kernels_are_enqueued = true});
#else
  fsdp::AdoptedUnit<Engine> unit(engine, "unit", {{"weight", &weight, &gradient, {8}}}, {.kernels_enqueued = true});
#endif
}
