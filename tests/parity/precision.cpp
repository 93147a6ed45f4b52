// SPDX-License-Identifier: Apache-2.0
// Precision policies: the same bits for every strategy, the rounding that they promise, files in fp32, memory.
// skip-sanitizers
#include <cmath>
#include <cstring>
#include <tuple>
#include <vector>

#include "tests/catch.hpp"
#include "tests/support/gradient_units.hpp"

namespace {

using fsdp::bf16;
using fsdp::fp16;
using Bf16Masters = fsdp::Precision<bf16, float, bf16>;
using Fp16Masters = fsdp::Precision<float, float, fp16>;

bool equal_bits(std::vector<float> const& a, std::vector<float> const& b) {
  return !a.empty() && a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

template <class P>
std::vector<float> train(fsdp::ShardingStrategy const& strategy, int ranks, int shard_group = 0) {
  return toy::on_patches<P>(strategy, ranks, shard_group, [](auto& engine, auto& patches) {
    fsdp::AdamW adamw(engine, {.weight_decay = 0.1f});
    for (int step = 0; step < 4; ++step) {
      patches.step({.step = step});
      auto const norm = fsdp::clip_grad_norm(engine, 1.0f);
      adamw.step(0.02f, norm);
    }
    return toy::all_parameters(engine);
  });
}

struct Snapshot {
  std::vector<float> parameters, gradients;
};

/// Masters at the start and the reduced gradients of one backward pass.
template <class P>
Snapshot one_pass(int ranks, fsdp::ShardingStrategy const& strategy = fsdp::FullShard{}, int shard_group = 0) {
  return toy::on_patches<P>(strategy, ranks, shard_group, [](auto& engine, auto& patches) {
    Snapshot shot;
    shot.parameters = toy::all_parameters(engine);
    patches.step({});
    engine.synchronize();
    shot.gradients = toy::all_gradients(engine);
    return shot;
  });
}

template <class T>
float rounded(float value) {
  return fsdp::widen(fsdp::narrow<T>(value));
}

}  // namespace

TEMPLATE_TEST_CASE("a precision policy trains alike under every strategy", "[precision]", fsdp::Fp32, fsdp::Bf16,
                   fsdp::Bf16Reduce, fsdp::Fp16, Bf16Masters) {
  for (int const ranks : {1, 3, 4}) {
    auto const full = train<TestType>(fsdp::FullShard{}, ranks);
    CHECK(equal_bits(train<TestType>(fsdp::NoShard{}, ranks), full));
    CHECK(equal_bits(train<TestType>(fsdp::ShardGradOp{}, ranks), full));
    if (ranks != 4) continue;
    auto const hybrid = train<TestType>(fsdp::HybridShard<>{}, ranks, 2);
    // Two rounded sums instead of one where the reduction is narrower than fp32.
    if constexpr (std::is_same_v<typename TestType::Reduce, float>) CHECK(equal_bits(hybrid, full));
    CHECK(hybrid.size() == full.size());
  }
}

TEMPLATE_TEST_CASE("gradients are those of rounded parameters, summed in fp32 and rounded once", "[precision]",
                   fsdp::Fp32, fsdp::Bf16, fsdp::Bf16Reduce, fsdp::Fp16, Bf16Masters, Fp16Masters) {
  using Param = typename TestType::Param;
  using Reduce = typename TestType::Reduce;
  using Master = typename TestType::Master;
  int const ranks = 3;
  auto const exact = one_pass<fsdp::Fp32>(ranks).parameters;
  auto const shot = one_pass<TestType>(ranks);
  REQUIRE(shot.parameters.size() == exact.size());
  REQUIRE(shot.gradients.size() == exact.size());
  std::size_t at = 0;
  bool parameters_right = true, gradients_right = true;
  std::uint32_t tensor = 0;
  for (std::int64_t const count : {7 * 31, 31, 40 * 9, 9, 3 * 130, 130}) {
    for (std::int64_t i = 0; i < count; ++i, ++at) {
      float const master = rounded<Master>(exact[at]);
      parameters_right = parameters_right && shot.parameters[at] == master;
      float terms[3];
      for (int rank = 0; rank < ranks; ++rank)
        terms[rank] = rounded<Reduce>(toy::gradient_of(rounded<Param>(master), toy::salt_of(0, rank, tensor), i, 1.0f));
      float const sum = rounded<Reduce>((terms[0] + terms[1]) + terms[2]);
      gradients_right = gradients_right && shot.gradients[at] == sum * (1.0f / 3.0f);
    }
    ++tensor;
  }
  CHECK(parameters_right);
  CHECK(gradients_right);
}

TEMPLATE_TEST_CASE("a narrow sum under HybridShard is rounded within the group, and again over replicas", "[precision]",
                   fsdp::Bf16Reduce, fsdp::Fp16) {
  using Param = typename TestType::Param;
  using Reduce = typename TestType::Reduce;
  auto const shot = one_pass<TestType>(4, fsdp::HybridShard<>{}, 2);
  std::size_t at = 0;
  std::uint32_t tensor = 0;
  bool right = true, twice = false;
  for (std::int64_t const count : {7 * 31, 31, 40 * 9, 9, 3 * 130, 130}) {
    for (std::int64_t i = 0; i < count; ++i, ++at) {
      float terms[4];
      for (int rank = 0; rank < 4; ++rank)
        terms[rank] = rounded<Reduce>(
            toy::gradient_of(rounded<Param>(shot.parameters[at]), toy::salt_of(0, rank, tensor), i, 1.0f));
      float const sum = rounded<Reduce>(rounded<Reduce>(terms[0] + terms[1]) + rounded<Reduce>(terms[2] + terms[3]));
      right = right && shot.gradients[at] == sum * 0.25f;
      twice = twice || sum != rounded<Reduce>((terms[0] + terms[1]) + (terms[2] + terms[3]));
    }
    ++tensor;
  }
  CHECK(at == shot.gradients.size());
  CHECK(right);
  CHECK(twice);  // it makes a difference
}

TEMPLATE_TEST_CASE("masters go out as fp32 and come back bit for bit", "[precision]", fsdp::Bf16, Bf16Masters,
                   Fp16Masters) {
  auto const saved = train<TestType>(fsdp::FullShard{}, 2);
  auto const loaded = toy::on_patches<TestType>(fsdp::FullShard{}, 3, 0, [&](auto& engine, auto&) {
    std::vector<std::size_t> begin{0};
    auto const tensors = fsdp::tensor_list(engine);
    for (auto const& tensor : tensors) begin.push_back(begin.back() + static_cast<std::size_t>(tensor.numel));
    fsdp::import_shard(engine, [&](fsdp::TensorInfo const& tensor, std::int64_t first, std::span<float> out) {
      std::size_t index = 0;
      while (tensors[index].name != tensor.name) ++index;
      for (std::size_t i = 0; i < out.size(); ++i) out[i] = saved[begin[index] + static_cast<std::size_t>(first) + i];
    });
    return toy::all_parameters(engine);
  });
  CHECK(equal_bits(loaded, saved));
}

TEMPLATE_TEST_CASE("every precision reserves what the plan says", "[precision]", fsdp::Fp32, fsdp::Bf16,
                   fsdp::Bf16Reduce, fsdp::Fp16, Bf16Masters, Fp16Masters) {
  auto const check = [](fsdp::ShardingStrategy const& strategy, int ranks, int shard_group) {
    auto const right = toy::on_patches<TestType>(strategy, ranks, shard_group, [](auto& engine, auto& patches) {
      fsdp::AdamW adamw(engine);
      patches.step({});
      adamw.step();
      auto const plan = fsdp::memory_plan(engine.plan_input());
      std::int64_t shard = 0;
      for (std::size_t u = 0; u < engine.shards().size(); ++u) shard += engine.shards()[u].shard_numel();
      auto const& account = engine.account();
      using fsdp::MemoryTag;
      return account.reserved_state() == plan.reserved() && account.live_state() == plan.rest() &&
             account.reserved(MemoryTag::parameters) ==
                 shard * static_cast<std::int64_t>(sizeof(typename TestType::Master)) &&
             account.reserved(MemoryTag::gradients) == shard * 4 &&
             account.reserved(MemoryTag::optimizer) == shard * 8 &&
             account.reserved(MemoryTag::gather) == plan.gather && account.reserved(MemoryTag::reduce) == plan.reduce;
    });
    CHECK(right);
  };
  check(fsdp::FullShard{}, 2, 0);
  check(fsdp::NoShard{}, 2, 0);
  check(fsdp::FullShard{}, 1, 0);
  check(fsdp::HybridShard<>{}, 4, 2);
}
