// SPDX-License-Identifier: Apache-2.0
// A misspelt option is named as what it is.
// expect: \.learning_rate
// expect: fsdp: expected \(engine\[, tensors\]\[, AdamWOptions\[, groups\]\]\); check the names in braces
#include "fsdp/fsdp.hpp"
#include "model_communicator.hpp"

using Engine = fsdp::Engine<compile_fail::Communicator>;
#ifdef CONTROL
void use(Engine& engine) { fsdp::AdamW adamw{engine, {.lr = 3e-4f}}; }
#else
void use(Engine& engine) { fsdp::AdamW adamw{engine, {.learning_rate = 3e-4f}}; }
#endif
