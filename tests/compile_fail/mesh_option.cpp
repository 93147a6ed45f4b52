// SPDX-License-Identifier: Apache-2.0
// A misspelt option is named as what it is.
// expect: \.group
// expect: fsdp: not MeshOptions: is a name misspelt, or out of order\?
#include "fsdp/fsdp.hpp"
#include "model_communicator.hpp"

#include <utility>

#ifdef CONTROL
void use(compile_fail::Communicator world) { fsdp::Mesh mesh{std::move(world), {.shard_group = 8}}; }
#else
void use(compile_fail::Communicator world) { fsdp::Mesh mesh{std::move(world), {.group = 8}}; }
#endif
