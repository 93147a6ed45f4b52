// SPDX-License-Identifier: Apache-2.0
// A misspelt option is named as what it is.
// expect: \.sead
// expect: fsdp: not EngineOptions: is a name misspelt, or out of order\?
#include "fsdp/fsdp.hpp"
#include "model_communicator.hpp"

#ifdef CONTROL
void use(fsdp::Mesh<compile_fail::Communicator>& mesh) {
  auto engine = fsdp::make_engine<fsdp::FullShard>(mesh, {.seed = 1});
}
#else
void use(fsdp::Mesh<compile_fail::Communicator>& mesh) {
  auto engine = fsdp::make_engine<fsdp::FullShard>(mesh, {.sead = 1});
}
#endif
