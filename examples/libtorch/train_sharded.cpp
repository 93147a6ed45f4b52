// SPDX-License-Identifier: Apache-2.0
// Trains a GPT of torch::nn modules, sharded over processes.
// usage: mpirun -n N train_sharded [text file]
#include <torch/torch.h>

#include <cstdio>
#include <string>
#include <vector>

#include "fsdp/fsdp.hpp"
#include "fsdp/libtorch.hpp"
#include "fsdp/mpi.hpp"
#include "gpt.hpp"
#include "text.hpp"

int train(fsdp::mpi::Environment& environment, int argc, char** argv) {
  example::Text const text(argc > 1 ? argv[1] : nullptr);
  example::Sizes const sizes;
  fsdp::Mesh mesh{fsdp::mpi::Communicator{environment}};
  auto compute = fsdp::host::Stream::inline_stream("compute");
  fsdp::Engine engine{mesh, fsdp::FullShard{}, {.prefetch = 1}, compute};
  fsdp::libtorch::Sharder sharder{engine};
  std::int64_t const rows = 12 / engine.world_size();
  at::set_num_threads(1);

  torch::manual_seed(1);
  auto embed = sharder.shard(example::Embed(sizes), "embed");
  std::vector<fsdp::libtorch::Sharded<example::BlockImpl>> blocks;
  for (int i = 0; i < sizes.layers; ++i)
    blocks.push_back(sharder.shard(example::Block(sizes), "h." + std::to_string(i)));
  auto head = sharder.shard(example::Head(sizes), "head");

  fsdp::libtorch::ShardOptimizer adamw{engine, torch::optim::AdamWOptions(1e-3)};

  for (int step = 0; step < 100; ++step) {
    auto const [ids, targets] = text.batch(step, engine.rank() * rows, rows, sizes.length);
    auto x = embed(ids);
    for (auto& block : blocks) x = block(x);
    auto const loss = torch::nn::functional::cross_entropy(head(x).flatten(0, 1), targets.flatten());
    loss.backward();
    adamw.step(fsdp::clip_grad_norm(engine, 1.0f));
    auto const mean = engine.mean_over_ranks({loss.item<double>()})[0];
    if (step % 10 == 9 && engine.rank() == 0) std::printf("step %d: loss %.5f\n", step + 1, mean);
  }
  return 0;
}

int main(int argc, char** argv) {
  return fsdp::mpi::run(argc, argv, [&](auto& environment) { return train(environment, argc, argv); });
}
