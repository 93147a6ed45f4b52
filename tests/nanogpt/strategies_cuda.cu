// SPDX-License-Identifier: Apache-2.0
// The model in bf16 on a GPU that several ranks share: the same bits whatever the strategy.
// timeout: 470
// nvcc-full
// links: nanogpt_layers_cuda
#include "fsdp/cuda.hpp"
#include "nanogpt/instances/layers_cuda.hpp"
#include "tests/catch.hpp"
#include "tests/conformance/gpu.hpp"
#include "tests/nanogpt/training.hpp"

namespace {

bool const ready = fsdp::testing::need_gpu();

model_test::Outcome train(fsdp::ShardingStrategy const& strategy, model_test::TrainingRun const& run) {
  return model_test::train<fsdp::Bf16>(strategy, fsdp::cuda::Device{}, run);
}

}  // namespace

TEST_CASE("strategies train the model bit by bit alike in bf16 on a GPU", "[nanogpt][model]") {
  model_test::TrainingRun run;
  run.interrupt = true;
#if defined(FSDP_CUDA_STANDIN)  // the other takes minutes in emulated thread blocks
  run.steps = 2;
  run.config = {2, 2, 32, 16, 65, 0.1f, true};
  run.ranks = 4;
#else
  run.steps = 10;
  run.config = {3, 2, 128, 64, 65, 0.1f, true};
  run.ranks = GENERATE(2, 4);
#endif
  CAPTURE(run.ranks);
  auto const expected = train(fsdp::NoShard{}, run);
  CHECK(train(fsdp::NoShard{}, run) == expected);
  CHECK(train(fsdp::FullShard{}, run) == expected);
  CHECK(train(fsdp::ShardGradOp{}, run) == expected);
  run.shard_group = 2;
  CHECK(train(fsdp::HybridShard<>{}, run) == expected);
}
