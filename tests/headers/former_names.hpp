// SPDX-License-Identifier: Apache-2.0
// Former names compile for one version. check.sh expects a warning in each line that ends with the comment "warns".
#include "fsdp/fsdp.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"

void step_names(fsdp::Program& program) {
  fsdp::Facts flags = fsdp::plain_step;                 // warns
  flags = fsdp::any_facts;                              // warns
  fsdp::Phase pass = fsdp::PassKind::forward;           // warns
  pass = fsdp::PassKind::activations;                   // warns
  fsdp::Program::Unit* const unit = &program.units[0];  // warns
  fsdp::StepUnit const* const declared = unit;          // warns
  fsdp::BufferPlan* const slot = nullptr;               // warns
  static_cast<void>(flags), static_cast<void>(pass), static_cast<void>(declared), static_cast<void>(slot);
}

static_assert(fsdp::TellsFailure<fsdp::host::Stream>);

template <class E>
void engine_names(E& engine) {
  auto const shards = engine.shards();
  static_cast<void>(shards.late_records());      // warns
  static_cast<void>(shards.kept(shards[0]));     // warns
  static_cast<void>(shards.gate());              // warns
  shards[0].begin_gradient(0);                   // warns
  engine.account().lease(fsdp::MemoryTag{}, 0);  // warns
}

void run(fsdp::Engine<fsdp::local::Communicator<fsdp::host::Device>>& engine, fsdp::Program& program) {
  step_names(program);
  engine_names(engine);
  fsdp::comm::Operation const call = fsdp::comm::CallDescription::exchange("texts");  // warns
  fsdp::TensorPlace const place = 0;                                                  // warns
  fsdp::Staging<fsdp::host::Device, float> const* const staging = nullptr;            // warns
  static_cast<void>(fsdp::comm::consult(engine.world(), "", "texts", fsdp::comm::no_text));  // warns
  static_cast<void>(call), static_cast<void>(place), static_cast<void>(staging);
}
