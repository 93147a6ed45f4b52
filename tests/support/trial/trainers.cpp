// SPDX-License-Identifier: Apache-2.0
// The engines of all strategies over threads, compiled once for every program that runs trials.
#include "tests/support/trial/trainer.hpp"

namespace trial {

std::unique_ptr<Trainer> make_trainer(Local comm, Trial const& of, Setting const& setting) {
  return make_trainer_of<fsdp::FullShard, fsdp::ShardGradOp, fsdp::HybridShard<fsdp::FullShard>,
                         fsdp::HybridShard<fsdp::ShardGradOp>, fsdp::NoShard>(std::move(comm), of, setting);
}

}  // namespace trial
