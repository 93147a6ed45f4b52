// SPDX-License-Identifier: Apache-2.0
// Whatever the strategy, the same parameters to the last bit; and those of one rank on the concatenated batch.
//
// skip-asan
#include <algorithm>
#include <cmath>
#include <cstring>

#include "tests/catch.hpp"
#include "tests/support/local_run.hpp"

namespace {

using toy::Run;
using toy::train_local;

bool equal_bits(std::vector<float> const& a, std::vector<float> const& b) {
  return !a.empty() && a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

double relative_difference(std::vector<float> const& a, std::vector<float> const& b) {
  double difference = 0.0, norm = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference += std::pow(static_cast<double>(a[i]) - static_cast<double>(b[i]), 2);
    norm += std::pow(static_cast<double>(b[i]), 2);
  }
  return a.size() == b.size() && norm > 0.0 ? std::sqrt(difference / norm) : INFINITY;
}

}  // namespace

TEST_CASE("all strategies end 50 clipped AdamW steps with bitwise equal parameters") {
  int const ranks = GENERATE(2, 3, 4);
  Run run;
  auto const full = train_local(fsdp::FullShard{}, ranks, run);
  REQUIRE(std::all_of(full.begin(), full.end(), [](float value) { return std::isfinite(value); }));
  CHECK(equal_bits(train_local(fsdp::FullShard{}, ranks, run), full));  // a second run repeats it
  CHECK(equal_bits(train_local(fsdp::ShardGradOp{}, ranks, run), full));
  CHECK(equal_bits(train_local(fsdp::NoShard{}, ranks, run), full));
  run.shard_group = ranks == 4 ? 2 : ranks;
  CHECK(equal_bits(train_local(fsdp::HybridShard<fsdp::FullShard>{}, ranks, run), full));
  CHECK(equal_bits(train_local(fsdp::HybridShard<fsdp::ShardGradOp>{}, ranks, run), full));
  run.shard_group = 1;
  CHECK(equal_bits(train_local(fsdp::HybridShard<fsdp::FullShard>{}, ranks, run), full));
}

TEST_CASE("options that move work in time do not move a bit") {
  Run run;
  run.steps = 8;
  run.shape.hidden = {17, 40, 5, 29, 31};
  auto const reference = train_local(fsdp::FullShard{}, 4, run);
  for (int const prefetch : {0, 2, 7}) {
    run.options.prefetch = prefetch;
    CHECK(equal_bits(train_local(fsdp::FullShard{}, 4, run), reference));
    CHECK(equal_bits(train_local(fsdp::ShardGradOp{}, 4, run), reference));
  }
  run.options = {};
  run.options.keep_last = run.options.keep_root = false;
  CHECK(equal_bits(train_local(fsdp::FullShard{}, 4, run), reference));
  run.options = {};
  run.options.bucket_bytes = 1024;
  run.options.first_bucket_bytes = 256;
  CHECK(equal_bits(train_local(fsdp::NoShard{}, 4, run), reference));
  run.options = {};
  run.evaluate_every = 2;
  CHECK(equal_bits(train_local(fsdp::FullShard{}, 4, run), reference));
  CHECK(equal_bits(train_local(fsdp::NoShard{}, 4, run), reference));
}

TEST_CASE("fifty SGD steps equal those of one rank on the concatenated batch") {
  Run run;
  run.optimizer = toy::Optimizer::sgd;
  auto const one = train_local(fsdp::FullShard{}, 1, run);
  for (int const ranks : {2, 3, 4}) {
    CHECK(relative_difference(train_local(fsdp::FullShard{}, ranks, run), one) <= 1e-5);
    CHECK(relative_difference(train_local(fsdp::NoShard{}, ranks, run), one) <= 1e-5);
  }
}

TEST_CASE("one rank trains alike under every strategy") {
  Run run;
  run.steps = 5;
  auto const full = train_local(fsdp::FullShard{}, 1, run);
  CHECK(equal_bits(train_local(fsdp::ShardGradOp{}, 1, run), full));
  CHECK(equal_bits(train_local(fsdp::NoShard{}, 1, run), full));
  run.shard_group = 1;
  CHECK(equal_bits(train_local(fsdp::HybridShard<>{}, 1, run), full));
}

TEST_CASE("micro-steps: reducing each time, or the last time alone") {
  Run run;
  run.steps = 10;
  run.micro_steps = 3;
  auto const each = train_local(fsdp::FullShard{}, 4, run);
  CHECK(relative_difference(train_local(fsdp::NoShard{}, 4, run), each) <= 1e-5);
  run.sync_last_only = true;
  run.options.allow_no_sync = true;
  auto const last = train_local(fsdp::FullShard{}, 4, run);
  CHECK(relative_difference(last, each) <= 1e-5);
  CHECK(equal_bits(train_local(fsdp::ShardGradOp{}, 4, run), last));
  CHECK(equal_bits(train_local(fsdp::NoShard{}, 4, run), last));
  run.shard_group = 2;
  CHECK(equal_bits(train_local(fsdp::HybridShard<>{}, 4, run), last));
}

TEST_CASE("ends of the range: tiny units, many ranks, no blocks, no root") {
  Run run;
  run.steps = 6;
  SECTION("a world larger than a unit's parameter count, ranks that own only padding") {
    run.shape.hidden = {1, 1};
    run.shape.width = 1;
    run.shape.inputs = 2;
    run.shape.global_rows = 14;
    auto const full = train_local(fsdp::FullShard{}, 7, run);
    CHECK(equal_bits(train_local(fsdp::NoShard{}, 7, run), full));
    CHECK(equal_bits(train_local(fsdp::ShardGradOp{}, 7, run), full));
  }
  SECTION("no blocks: the tied ends alone") {
    run.shape.hidden = {};
    auto const full = train_local(fsdp::FullShard{}, 3, run);
    CHECK(equal_bits(train_local(fsdp::NoShard{}, 3, run), full));
    CHECK(equal_bits(train_local(fsdp::ShardGradOp{}, 3, run), full));
  }
  SECTION("one unit, no root") {
    run.shape.hidden = {9};
    run.shape.tied = false;
    auto const full = train_local(fsdp::FullShard{}, 3, run);
    CHECK(equal_bits(train_local(fsdp::NoShard{}, 3, run), full));
    CHECK(equal_bits(train_local(fsdp::ShardGradOp{}, 3, run), full));
  }
  SECTION("blocks alone") {
    run.shape.hidden = {9, 17, 3};
    run.shape.tied = false;
    auto const full = train_local(fsdp::FullShard{}, 4, run);
    CHECK(equal_bits(train_local(fsdp::NoShard{}, 4, run), full));
    run.shard_group = 2;
    CHECK(equal_bits(train_local(fsdp::HybridShard<>{}, 4, run), full));
  }
}
