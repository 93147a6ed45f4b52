// SPDX-License-Identifier: Apache-2.0
// Trains a GPT of torch::nn modules.
// usage: train [text file]
#include <torch/torch.h>

#include <cstdio>
#include <vector>

#include "gpt.hpp"
#include "text.hpp"

int main(int argc, char** argv) {
  example::Text const text(argc > 1 ? argv[1] : nullptr);
  example::Sizes const sizes;
  std::int64_t const rows = 12;
  at::set_num_threads(1);

  torch::manual_seed(1);
  auto embed = example::Embed(sizes);
  std::vector<example::Block> blocks;
  for (int i = 0; i < sizes.layers; ++i) blocks.push_back(example::Block(sizes));
  auto head = example::Head(sizes);

  auto parameters = embed->parameters();
  for (auto& block : blocks)
    for (auto& parameter : block->parameters()) parameters.push_back(parameter);
  for (auto& parameter : head->parameters()) parameters.push_back(parameter);
  torch::optim::AdamW adamw(parameters, torch::optim::AdamWOptions(1e-3));

  for (int step = 0; step < 100; ++step) {
    auto const [ids, targets] = text.batch(step, 0, rows, sizes.length);
    auto x = embed(ids);
    for (auto& block : blocks) x = block(x);
    auto const loss = torch::nn::functional::cross_entropy(head(x).flatten(0, 1), targets.flatten());
    adamw.zero_grad();
    loss.backward();
    torch::nn::utils::clip_grad_norm_(parameters, 1.0);
    adamw.step();
    if (step % 10 == 9) std::printf("step %d: loss %.5f\n", step + 1, loss.item<double>());
  }
}
