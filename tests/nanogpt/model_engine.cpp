// SPDX-License-Identifier: Apache-2.0
// The model on the real engine: strategies agree, training lowers the loss, evaluation and decoding may come in
// between.
// long
// skip-asan

#include <cmath>

#include "fsdp/host.hpp"
#include "tests/catch.hpp"
#include "tests/nanogpt/training.hpp"
#include "tests/support/sanitized.hpp"
#include "transformer/math/gemm_host.hpp"

namespace {

constexpr int few_steps = fsdp::testing::sanitized ? 3 : 8;

/// `ranks` threads on the host, in fp32.
model_test::Outcome train(fsdp::ShardingStrategy const& strategy, int ranks, bool interrupt, int steps = few_steps,
                          std::int64_t recompute = 0, int micro_steps = 2) {
  model_test::TrainingRun run;
  run.ranks = ranks;
  run.steps = steps;
  run.micro_steps = micro_steps;
  run.interrupt = interrupt;
  run.recompute = recompute;
  return model_test::train<fsdp::Fp32>(strategy, fsdp::host::Device{}, run);
}

/// Trains on ranks of several threads. @param wide  so wide that matrix products are cut into tiles
model_test::Outcome train_on(int threads, int ranks, bool wide) {
  model_test::TrainingRun run;
  run.ranks = ranks;
  run.steps = 3;
  if (wide) {
    run.config = {2, 4, 192, 64, 1100, 0.1f, true};
    run.batch = 4;
  }
  return model_test::train<fsdp::Fp32>(fsdp::FullShard{}, fsdp::host::Device{threads}, run);
}

}  // namespace

TEST_CASE("training lowers the loss from that of a uniform guess", "[nanogpt][model][engine]") {
  if (fsdp::testing::sanitized) return;  // many steps of the same code
  auto const outcome = train(fsdp::FullShard{}, 1, true, 40);
  CHECK(std::abs(outcome.losses.front() - std::log(23.0)) < 0.2);
  CHECK(outcome.losses.back() < 1.0);                         // the next token is a function of the last one
  CHECK(outcome.evaluations.back() < outcome.losses.back());  // no dropout
  for (auto const logit : outcome.logits) CHECK(std::isfinite(logit));
}

TEST_CASE("strategies train the model bit by bit alike", "[nanogpt][model][engine]") {
  // With several micro-steps FullShard reduces each, NoShard their sum: equal only in exact arithmetic.
  auto const expected = train(fsdp::NoShard{}, 2, false, few_steps, false, 1);
  CHECK(train(fsdp::FullShard{}, 2, false, few_steps, false, 1).losses == expected.losses);
  CHECK(train(fsdp::ShardGradOp{}, 2, false, few_steps, false, 1).losses == expected.losses);
}

TEST_CASE("evaluation and decoding leave training as it was", "[nanogpt][model][engine]") {
  CHECK(train(fsdp::FullShard{}, 2, true).losses == train(fsdp::FullShard{}, 2, false).losses);
}

TEST_CASE("recomputed layers give the same losses", "[nanogpt][model][engine]") {
  auto const kept = train(fsdp::FullShard{}, 2, false, 4).losses;
  for (auto const layers : {2, 1, 1000}) {
    CHECK(train(fsdp::FullShard{}, 2, false, 4, layers).losses == kept);
    if (fsdp::testing::sanitized) break;
  }
}

TEST_CASE("any number of threads trains to the same bits", "[nanogpt][model][engine]") {
#if defined(TRANSFORMER_PLAIN_GEMM)  // ThreadSanitizer looks for races, not at wide models
  CHECK(train_on(3, 2, false) == train_on(1, 2, false));
#else
  auto const alone = train_on(1, 1, true);
  for (int const threads : {2, 3, 5, 8, 16}) {
    if (fsdp::testing::sanitized && threads != 5) continue;
    CAPTURE(threads);
    CHECK(train_on(threads, 1, true) == alone);
  }
  CHECK(train_on(4, 2, true) == train_on(1, 2, true));
#endif
}
