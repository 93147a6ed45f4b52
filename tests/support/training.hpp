// SPDX-License-Identifier: Apache-2.0
// One rank's training run of the toy network: the body of parity, count and memory tests.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "fsdp/fsdp.hpp"
#include "fsdp/optim/muon.hpp"
#include "tests/support/shard_group.hpp"
#include "tests/support/toy_model.hpp"

namespace toy {

enum class Optimizer { adamw, sgd, muon };

struct Run {
  int shard_group = 0;
  Shape shape{};
  fsdp::EngineOptions options{};
  int steps = 50;
  int micro_steps = 1;
  bool sync_last_only = false;  ///< reduce in the last micro-step alone
  float clip = 1.0f;            ///< 0: off
  bool relative_clip = false;   ///< clip to `clip` times the norm, which is measured first
  Optimizer optimizer = Optimizer::adamw;
  int evaluate_every = 0;  ///< an evaluation pass before every k-th step
};

/// @return the full parameters on rank 0
template <class Comm>
std::vector<float> train(fsdp::ShardingStrategy const& strategy, Comm comm, Run const& run) {
  fsdp::Mesh<Comm> mesh(std::move(comm));
  fsdp::Engine<Comm> engine(mesh, fsdp::testing::in_groups_of(run.shard_group, strategy), run.options);
  Network network(engine, run.shape);
  auto const loop = [&](auto&& step_by, float lr) {
    for (std::int64_t step = 0; step < run.steps; ++step) {
      if (run.evaluate_every > 0 && step % run.evaluate_every == 0) {
        auto const scope = engine.evaluation();
        network.forward(1000 + step);
      }
      for (int micro = 0; micro < run.micro_steps; ++micro) {
        auto const waits = engine.no_sync(run.sync_last_only && micro + 1 < run.micro_steps);
        network.step(step * run.micro_steps + micro, 1.0f / static_cast<float>(run.micro_steps));
      }
      float const scale = run.relative_clip ? static_cast<float>(fsdp::clip_grad_norm(engine, 1e30f).value()) : 1.0f;
      fsdp::GradNorm<fsdp::Engine<Comm>> norm;
      if (run.clip > 0.0f) norm = fsdp::clip_grad_norm(engine, run.clip * scale);
      step_by(lr, norm);
    }
  };
  if (run.optimizer == Optimizer::adamw) {
    fsdp::AdamW adamw(engine, {.lr = 1e-2f, .weight_decay = 0.1f});
    loop([&](float lr, auto const& norm) { adamw.step(lr, norm); }, 1e-2f);
    return parameters(engine);
  }
  if (run.optimizer == Optimizer::muon) {
    fsdp::Muon muon(engine, fsdp::TensorSelection::all(), {.iterations = 2});
    fsdp::AdamW adamw(engine, muon.rest());
    fsdp::Optimizers both(muon, adamw);
    loop([&](float lr, auto const& norm) { both.step({lr, lr}, norm); }, 1e-2f);
    return parameters(engine);
  }
  fsdp::Sgd sgd(engine, {.lr = 1e-1f, .momentum = 0.5f, .weight_decay = 1e-3f});
  loop([&](float lr, auto const& norm) { sgd.step(lr, norm); }, 1e-1f);
  return parameters(engine);
}

}  // namespace toy
