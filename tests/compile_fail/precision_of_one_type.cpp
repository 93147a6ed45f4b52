// SPDX-License-Identifier: Apache-2.0
// An engine's precision is a policy, not an element type.
// expect: fsdp: expected \(mesh, strategy\[, precision\]\[, options\]\[, stream\]\); check the names in braces
#include "fsdp/fsdp.hpp"
#include "model_communicator.hpp"

#ifdef CONTROL
using P = fsdp::Bf16;
#else
using P = fsdp::bf16;
#endif
void use(fsdp::Mesh<compile_fail::Communicator>& mesh) { fsdp::Engine engine{mesh, fsdp::FullShard{}, P{}}; }
