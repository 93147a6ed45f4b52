// SPDX-License-Identifier: Apache-2.0
// A misspelt option is named as what it is.
// expect: \.prefech
// expect: fsdp: expected \(mesh, strategy\[, precision\]\[, options\]\[, stream\]\); check the names in braces
#include "fsdp/fsdp.hpp"
#include "model_communicator.hpp"

using Engine = fsdp::Engine<compile_fail::Communicator>;
#ifdef CONTROL
void use(fsdp::Mesh<compile_fail::Communicator>& mesh) { Engine engine{mesh, fsdp::FullShard{}, {.prefetch = 1}}; }
#else
void use(fsdp::Mesh<compile_fail::Communicator>& mesh) { Engine engine{mesh, fsdp::FullShard{}, {.prefech = 1}}; }
#endif
