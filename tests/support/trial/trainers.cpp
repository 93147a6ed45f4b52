// SPDX-License-Identifier: Apache-2.0
// Engines over threads, compiled once for every program that runs trials.
#include "tests/support/trial/trainer.hpp"

namespace trial {

std::unique_ptr<Trainer> make_trainer(Local comm, Trial const& of, Setting const& setting) {
  if (of.narrow) return std::make_unique<EngineTrainer<Local, fsdp::Bf16>>(std::move(comm), of, setting);
  return std::make_unique<EngineTrainer<Local>>(std::move(comm), of, setting);
}

}  // namespace trial
