// SPDX-License-Identifier: Apache-2.0
// A misspelt option is named as what it is.
// expect: \.sead
// expect: fsdp: expected \(mesh, strategy\[, precision\]\[, options\]\[, stream\]\); check the names in braces
#include "fsdp/fsdp.hpp"
#include "model_communicator.hpp"

#ifdef CONTROL
void use(fsdp::Mesh<compile_fail::Communicator>& mesh) {
  fsdp::Engine engine{mesh, fsdp::FullShard{}, fsdp::Bf16{}, {.seed = 1}};
}
#else
void use(fsdp::Mesh<compile_fail::Communicator>& mesh) {
  fsdp::Engine engine{mesh, fsdp::FullShard{}, fsdp::Bf16{}, {.sead = 1}};
}
#endif
