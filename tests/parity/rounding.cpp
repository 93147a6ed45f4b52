// SPDX-License-Identifier: Apache-2.0
// bf16 moments and stochastic rounding: the same bits for any sharding, and half the memory.
// skip-sanitizers
#include <cmath>
#include <cstring>
#include <vector>

#include "tests/catch.hpp"
#include "tests/support/gradient_units.hpp"

namespace {

using fsdp::bf16;
using Bf16Masters = fsdp::Precision<bf16, float, bf16>;
using Fp16Masters = fsdp::Precision<float, float, fsdp::fp16>;

struct Settings {
  int steps = 6;
  float lr = 0.02f;
  bool stochastic = true;
  std::uint64_t seed = 5;
  bool alike = true;
  float clip = 0.0f;
};

template <class P, class Moment>
std::vector<float> train(fsdp::ShardingStrategy const& strategy, int ranks, Settings const& settings,
                         int shard_group = 0) {
  return toy::on_patches<P>(strategy, ranks, shard_group, [&](auto& engine, auto& patches) {
    fsdp::AdamW<std::remove_reference_t<decltype(engine)>, Moment> adamw(
        engine, {.weight_decay = 0.1f, .stochastic_rounding = settings.stochastic, .seed = settings.seed});
    for (int step = 0; step < settings.steps; ++step) {
      patches.step({.step = step, .alike = settings.alike});
      fsdp::GradNorm<std::remove_reference_t<decltype(engine)>> norm;
      if (settings.clip > 0.0f) norm = fsdp::clip_grad_norm(engine, settings.clip);
      adamw.step(settings.lr, norm);
    }
    return toy::all_parameters(engine);
  });
}

bool equal_bits(std::vector<float> const& a, std::vector<float> const& b) {
  return !a.empty() && a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

double distance(std::vector<float> const& a, std::vector<float> const& b) {
  double sum = 0.0, size = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    sum += std::pow(static_cast<double>(a[i]) - static_cast<double>(b[i]), 2);
    size += std::pow(static_cast<double>(b[i]), 2);
  }
  return std::sqrt(sum / size);
}

template <class P, class Moment>
void equal_everywhere() {
  auto const one = train<P, Moment>(fsdp::FullShard{}, 1, {});
  CHECK(equal_bits(train<P, Moment>(fsdp::FullShard{}, 1, {}), one));
  for (int const ranks : {2, 3, 4}) {
    CHECK(equal_bits(train<P, Moment>(fsdp::FullShard{}, ranks, {}), one));
    CHECK(equal_bits(train<P, Moment>(fsdp::NoShard{}, ranks, {}), one));
    CHECK(equal_bits(train<P, Moment>(fsdp::ShardGradOp{}, ranks, {}), one));
  }
  CHECK(equal_bits(train<P, Moment>(fsdp::HybridShard<>{}, 4, {}, 2), one));
  // With gradients of each rank's own, and clipping, at one world size.
  Settings own{.alike = false, .clip = 0.5f};
  auto const full = train<P, Moment>(fsdp::FullShard{}, 4, own);
  CHECK(equal_bits(train<P, Moment>(fsdp::NoShard{}, 4, own), full));
  CHECK(equal_bits(train<P, Moment>(fsdp::HybridShard<>{}, 4, own, 2), full));
  // The seed and the rounding matter.
  CHECK_FALSE(equal_bits(train<P, Moment>(fsdp::FullShard{}, 1, {.seed = 6}), one));
  CHECK_FALSE(equal_bits(train<P, Moment>(fsdp::FullShard{}, 1, {.stochastic = false}), one));
}

}  // namespace

TEST_CASE("stochastic rounding gives the same bits on one to four ranks, under every strategy") {
  SECTION("bf16 moments of fp32 masters") { equal_everywhere<fsdp::Fp32, bf16>(); }
  SECTION("bf16 masters and moments") { equal_everywhere<Bf16Masters, bf16>(); }
  SECTION("fp16 masters") { equal_everywhere<Fp16Masters, float>(); }
}

TEST_CASE("bf16 masters rounded at random stay near fp32's where nearest leaves them behind") {
  // 100 steps of lr 1e-4: each is less than half of bf16's spacing at 0.1 and above.
  Settings settings{.steps = 100, .lr = 1e-4f};
  auto const random = train<Bf16Masters, bf16>(fsdp::FullShard{}, 2, settings);
  settings.stochastic = false;
  auto const exact = train<fsdp::Fp32, float>(fsdp::FullShard{}, 2, settings);
  auto const nearest = train<Bf16Masters, float>(fsdp::FullShard{}, 2, settings);
  auto const start = train<fsdp::Fp32, float>(fsdp::FullShard{}, 2, {.steps = 0, .stochastic = false});
  // How far the run went along the way of the exact one: 1 is all of it.
  auto const progress = [&](std::vector<float> const& end) {
    double along = 0.0, whole = 0.0;
    for (std::size_t i = 0; i < end.size(); ++i) {
      double const way = static_cast<double>(exact[i]) - static_cast<double>(start[i]);
      along += way * (static_cast<double>(end[i]) - static_cast<double>(start[i]));
      whole += way * way;
    }
    return along / whole;
  };
  CHECK(std::fabs(progress(random) - 1.0) < 0.1);
  CHECK(progress(nearest) < 0.6);
  CHECK(distance(random, exact) < 0.02);
}

TEST_CASE("bf16 moments take half the memory, as the plan says") {
  auto const right = toy::on_patches<Bf16Masters>(fsdp::FullShard{}, 2, 0, [](auto& engine, auto& patches) {
    fsdp::AdamW<std::remove_reference_t<decltype(engine)>, bf16> adamw(engine, {.stochastic_rounding = true});
    patches.step({});
    adamw.step();
    auto input = engine.plan_input();
    input.moment_bytes = sizeof(bf16);
    auto const plan = fsdp::memory_plan(input);
    std::int64_t shard = 0;
    for (std::size_t u = 0; u < engine.shards().size(); ++u) shard += engine.shards()[u].shard_numel();
    auto const& account = engine.account();
    return plan.optimizer == 4 * shard && account.reserved(fsdp::MemoryTag::optimizer) == plan.optimizer &&
           account.reserved_state() == plan.reserved() && account.live_state() == plan.rest();
  });
  CHECK(right);
}

TEST_CASE("stochastic rounding with nothing to round is an error") {
  auto const texts = toy::on_patches<fsdp::Fp32>(fsdp::FullShard{}, 1, 0, [](auto& engine, auto&) {
    std::vector<std::string> caught;
    try {
      fsdp::AdamW adamw(engine, {.stochastic_rounding = true});
    } catch (fsdp::UsageError const& error) {
      caught.emplace_back(error.what());
    }
    try {
      fsdp::Sgd sgd(engine, {.momentum = 0.9f, .stochastic_rounding = true});
    } catch (fsdp::UsageError const& error) {
      caught.emplace_back(error.what());
    }
    return caught;
  });
  REQUIRE(texts.size() == 2);
  CHECK(texts[0].find("AdamW: stochastic rounding needs masters or moments narrower than fp32") != std::string::npos);
  CHECK(texts[1].find("Sgd: stochastic rounding") != std::string::npos);
}
