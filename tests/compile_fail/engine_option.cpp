// SPDX-License-Identifier: Apache-2.0
// A misspelt option is named as what it is.
// expect: \.prefech
// expect: fsdp: not EngineOptions: is a name misspelt, or out of order\?
#include "fsdp/fsdp.hpp"
#include "model_communicator.hpp"

using Engine = fsdp::Engine<fsdp::FullShard, compile_fail::Communicator>;
#ifdef CONTROL
void use(fsdp::Mesh<compile_fail::Communicator>& mesh) { Engine engine{mesh, {.prefetch = 1}}; }
#else
void use(fsdp::Mesh<compile_fail::Communicator>& mesh) { Engine engine{mesh, {.prefech = 1}}; }
#endif
