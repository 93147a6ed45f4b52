// SPDX-License-Identifier: Apache-2.0
// The engine over threads, compiled once for every program that runs trials.
#include "tests/support/trial/trainer.hpp"

namespace trial {

std::unique_ptr<Trainer> make_trainer(Local comm, Trial const& of, Setting const& setting) {
  return std::make_unique<EngineTrainer<Local>>(std::move(comm), of, setting);
}

}  // namespace trial
