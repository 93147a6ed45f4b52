// SPDX-License-Identifier: Apache-2.0
// The training loop: the same on threads, under mpirun and on GPUs.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "mlp.hpp"
#include "regression.hpp"

namespace mlp {

/// Trains for `steps` steps; rank 0 prints the loss. @return the last loss, averaged over ranks
template <class Comm>
double train(Comm comm, int steps) {
  constexpr std::size_t depth = 3;
  constexpr std::int64_t rows = 32, width = 8;
  fsdp::Mesh mesh{std::move(comm)};
  fsdp::Engine engine{mesh, fsdp::FullShard{}, {.prefetch = 1}};
  auto layers = engine.shard(std::vector(depth, Mlp<typename Comm::Device>{engine.device(), rows, width}), "layers");
  fsdp::AdamW adamw{engine, {.lr = 3e-3f, .weight_decay = 0.01f}};
  Regression batch{engine, rows, width, depth};

  for (int step = 0; step < steps; ++step) {
    for (std::size_t i = 0; i < depth; ++i)  // gather, compute, drop; the next layer is gathered meanwhile
      layers[i].forward(batch.x(i), batch.x(i + 1), batch.hidden(i));
    batch.compare();
    for (std::size_t i = depth; i-- > 0;)  // gather, compute, reduce-scatter, drop
      layers[i].backward(batch.x(i), batch.hidden(i), batch.dy(), batch.dhidden());
    auto const norm = fsdp::clip_grad_norm(engine, 1.0f);
    adamw.step(norm);
    if (step % 100 == 0) batch.print_loss(step);
  }
  return batch.loss();
}

}  // namespace mlp
