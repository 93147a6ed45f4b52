// SPDX-License-Identifier: Apache-2.0
// A misspelt option is named as what it is.
// expect: \.kind
// expect: fsdp: expected \(engine, max_norm\[, ClipOptions\]\); check the names in braces
#include "fsdp/fsdp.hpp"
#include "model_communicator.hpp"

using Engine = fsdp::Engine<compile_fail::Communicator>;
#ifdef CONTROL
void use(Engine& engine) { auto norm = fsdp::clip_grad_norm(engine, 1.0f, {.norm = fsdp::NormKind::inf}); }
#else
void use(Engine& engine) { auto norm = fsdp::clip_grad_norm(engine, 1.0f, {.kind = fsdp::NormKind::inf}); }
#endif
