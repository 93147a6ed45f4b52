// SPDX-License-Identifier: Apache-2.0
// A misspelt option is named as what it is.
// expect: \.scale
// expect: fsdp: expected \(engine\[, GradScalerOptions\]\); check the names in braces
#include "fsdp/fsdp.hpp"
#include "model_communicator.hpp"

using Engine = fsdp::Engine<compile_fail::Communicator>;
#ifdef CONTROL
void use(Engine& engine) { fsdp::GradScaler scaler{engine, {.init_scale = 1024.0f}}; }
#else
void use(Engine& engine) { fsdp::GradScaler scaler{engine, {.scale = 1024.0f}}; }
#endif
