// SPDX-License-Identifier: Apache-2.0
// The file of a trainer that saves the run and resumes it, as an example of a user's file.
#include "fsdp/checkpoint.hpp"
#include "fsdp/fsdp.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"

using Engine = fsdp::Engine<fsdp::local::Communicator<fsdp::host::Device>>;

/// @return the step after which the run goes on
int resume(Engine& engine, fsdp::AdamW<Engine>& adamw) {
  auto const loaded = fsdp::load_latest(engine, adamw, "checkpoints");
  return loaded ? loaded->extra["step"].get<int>() : 0;
}

void save(Engine& engine, fsdp::AdamW<Engine>& adamw, int step) {
  fsdp::save(engine, adamw, "checkpoints", {{"step", step}});
}
