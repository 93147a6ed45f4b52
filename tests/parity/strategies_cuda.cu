// SPDX-License-Identifier: Apache-2.0
// The engine over CUDA: ranks as threads that share a GPU reach the same bits whatever the strategy.
// timeout: 470
// nvcc-full
#include <cmath>
#include <cstring>
#include <vector>

#include "fsdp/cuda.hpp"
#include "tests/catch.hpp"
#include "tests/conformance/gpu.hpp"
#include "tests/support/local_run.hpp"

namespace {

bool const ready = fsdp::testing::need_gpu();

bool equal_bits(std::vector<float> const& a, std::vector<float> const& b) {
  return !a.empty() && a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

std::vector<float> train(fsdp::ShardingStrategy const& strategy, int ranks, toy::Run const& run) {
  return toy::train_local(strategy, ranks, run, fsdp::cuda::Device{});
}

}  // namespace

TEST_CASE("all strategies end clipped AdamW steps with bitwise equal parameters on a GPU") {
  int const ranks = GENERATE(2, 3, 4);
  toy::Run run;
#if defined(FSDP_CUDA_STANDIN)  // 50 take half a minute in emulated thread blocks
  run.steps = 12;
#endif
  auto const full = train(fsdp::FullShard{}, ranks, run);
  CHECK(equal_bits(train(fsdp::FullShard{}, ranks, run), full));
  CHECK(equal_bits(train(fsdp::ShardGradOp{}, ranks, run), full));
  CHECK(equal_bits(train(fsdp::NoShard{}, ranks, run), full));
  run.shard_group = ranks == 4 ? 2 : ranks;
  CHECK(equal_bits(train(fsdp::HybridShard<>{}, ranks, run), full));
}

TEST_CASE("fifty SGD steps on a GPU equal those of the host") {
  toy::Run run;
  run.optimizer = toy::Optimizer::sgd;
  auto const host = toy::train_local(fsdp::FullShard{}, 2, run);
  auto const gpu = train(fsdp::FullShard{}, 2, run);
  REQUIRE(host.size() == gpu.size());
  double difference = 0.0, norm = 0.0;
  for (std::size_t i = 0; i < host.size(); ++i) {
    difference += std::pow(static_cast<double>(host[i]) - static_cast<double>(gpu[i]), 2);
    norm += std::pow(static_cast<double>(host[i]), 2);
  }
  CHECK(std::sqrt(difference / norm) <= 1e-4);
}
