// SPDX-License-Identifier: Apache-2.0
// One rank's training run of the toy network: the body of parity, count and memory tests.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "fsdp/fsdp.hpp"
#include "tests/support/sanitized.hpp"
#include "tests/support/shard_group.hpp"
#include "tests/support/toy_model.hpp"

namespace toy {

enum class Optimizer { adamw, sgd };

struct Run {
  int shard_group = 0;
  Shape shape{};
  fsdp::EngineOptions options{};
  int steps = fsdp::testing::sanitized ? 5 : 50;
  int micro_steps = 1;
  bool sync_last_only = false;  ///< reduce in the last micro-step alone
  float clip = 1.0f;            ///< 0: off
  bool relative_clip = false;   ///< clip to `clip` times the norm, which is measured first
  Optimizer optimizer = Optimizer::adamw;
  int evaluate_every = 0;  ///< an evaluation pass before every k-th step
};

/// @param act  called as act(engine, loop); calls loop(step, lr), where step(lr, norm) is an optimizer's step
/// @return the full parameters on rank 0
template <class Comm, class Act>
std::vector<float> train_by(fsdp::ShardingStrategy const& strategy, Comm comm, Run const& run, Act const& act) {
  fsdp::Mesh<Comm> mesh(std::move(comm));
  fsdp::Engine<Comm> engine(mesh, fsdp::testing::in_groups_of(run.shard_group, strategy), run.options);
  Network network(engine, run.shape);
  std::vector<float> result;
  act(engine, [&](auto const& optimizer_step, float lr) {
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
      optimizer_step(lr, norm);
    }
    result = parameters(engine);
  });
  return result;
}

/// @return the full parameters on rank 0
template <class Comm>
std::vector<float> train(fsdp::ShardingStrategy const& strategy, Comm comm, Run const& run) {
  return train_by(strategy, std::move(comm), run, [&](auto& engine, auto const& loop) {
    if (run.optimizer == Optimizer::adamw) {
      fsdp::AdamW adamw(engine, {.lr = 1e-2f, .weight_decay = 0.1f});
      return loop([&](float lr, auto const& norm) { adamw.step(lr, norm); }, 1e-2f);
    }
    fsdp::Sgd sgd(engine, {.lr = 1e-1f, .momentum = 0.5f, .weight_decay = 1e-3f});
    loop([&](float lr, auto const& norm) { sgd.step(lr, norm); }, 1e-1f);
  });
}

}  // namespace toy
