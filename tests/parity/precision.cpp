// SPDX-License-Identifier: Apache-2.0
// Precision policies: the same bits for every strategy, the rounding that they promise, files in fp32, memory.
// skip-sanitizers
#include <cmath>
#include <cstring>
#include <string>
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
std::vector<float> train(fsdp::ShardingStrategy const& strategy, int ranks, int shard_group = 0,
                         fsdp::EngineOptions const& options = {}) {
  auto const four_steps = [](auto& engine, auto& patches) {
    fsdp::AdamW adamw(engine, {.weight_decay = 0.1f});
    for (int step = 0; step < 4; ++step) {
      patches.step({.step = step});
      auto const norm = fsdp::clip_grad_norm(engine, 1.0f);
      adamw.step(0.02f, norm);
    }
    return toy::all_parameters(engine);
  };
  return toy::on_patches<P>(strategy, ranks, shard_group, four_steps, options);
}
/// Options: gradients are rounded before they are sent; buckets are smaller than units.
fsdp::EngineOptions travelling_in(fsdp::DType type) {
  return {.bucket_bytes = 900, .first_bucket_bytes = 300, .reduce_dtype = type};
}

struct Snapshot {
  std::vector<float> parameters, gradients;
};

/// How the micro-steps before the last end.
enum class Before { reduce, wait, sum_in_group };

/// Masters at the start and the reduced gradients of one backward pass, or of several.
template <class P>
Snapshot one_pass(int ranks, fsdp::ShardingStrategy const& strategy = fsdp::FullShard{}, int shard_group = 0,
                  fsdp::EngineOptions options = {}, int micro_steps = 1, Before before = Before::reduce) {
  options.allow_no_sync = before == Before::wait;
  options.allow_no_replica_sync = before == Before::sum_in_group;
  auto const pass = [&](auto& engine, auto& patches) {
    Snapshot shot;
    shot.parameters = toy::all_parameters(engine);
    for (int micro = 0; micro < micro_steps; ++micro) {
      bool const last = micro + 1 == micro_steps;
      auto const waits = engine.no_sync(before == Before::wait && !last);
      auto const group_sums_wait = engine.no_replica_sync(before == Before::sum_in_group && !last);
      patches.step({.step = micro});
    }
    engine.synchronize();
    shot.gradients = toy::all_gradients(engine);
    return shot;
  };
  return toy::on_patches<P>(strategy, ranks, shard_group, pass, options);
}

/// Calls `check(term, gradient)` for every element, where term(micro, rank) is what a rank's backward adds to it.
template <class Check>
void each_gradient(Snapshot const& shot, Check const& check) {
  std::size_t at = 0;
  std::uint32_t tensor = 0;
  for (std::int64_t const count : {7 * 31, 31, 40 * 9, 9, 3 * 130, 130}) {
    for (std::int64_t i = 0; i < count; ++i, ++at)
      check([&](int micro,
                int rank) { return toy::gradient_of(shot.parameters[at], toy::salt_of(micro, rank, tensor), i, 1.0f); },
            shot.gradients[at]);
    ++tensor;
  }
  CHECK(at == shot.gradients.size());
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

TEST_CASE("gradients that travel in bf16: the same bits for every strategy, and never rounded on one rank",
          "[precision]") {
  auto const options = travelling_in(fsdp::DType::bf16);
  for (int const ranks : {1, 3, 4}) {
    auto const full = train<fsdp::Fp32>(fsdp::FullShard{}, ranks, 0, options);
    CHECK(equal_bits(train<fsdp::Fp32>(fsdp::NoShard{}, ranks, 0, options), full));
    CHECK(equal_bits(train<fsdp::Fp32>(fsdp::ShardGradOp{}, ranks, 0, options), full));
    CHECK(equal_bits(train<fsdp::Fp32>(fsdp::FullShard{}, ranks), full) == (ranks == 1));
    // A group of one rank has nothing to scatter: its gradients travel in buckets.
    CHECK(equal_bits(train<fsdp::Fp32>(fsdp::HybridShard<>{}, ranks, 1, options), full));
  }
}

TEST_CASE("gradients that travel in bf16 are those that backward writes in bf16, if it writes them once",
          "[precision]") {
  auto const options = travelling_in(fsdp::DType::bf16);
  CHECK(equal_bits(train<fsdp::Bf16>(fsdp::FullShard{}, 3, 0, options), train<fsdp::Bf16Reduce>(fsdp::FullShard{}, 3)));
  CHECK(equal_bits(train<fsdp::Bf16>(fsdp::HybridShard<>{}, 4, 2, options),
                   train<fsdp::Bf16Reduce>(fsdp::HybridShard<>{}, 4, 2)));
  auto partial = options;
  partial.allow_no_replica_sync = true;
  CHECK(equal_bits(train<fsdp::Bf16>(fsdp::HybridShard<>{}, 4, 2, partial),
                   train<fsdp::Bf16Reduce>(fsdp::HybridShard<>{}, 4, 2, {.allow_no_replica_sync = true})));
}

TEST_CASE("gradients that travel are rounded once on each rank, and their sum once", "[precision]") {
  auto const check = [](auto type, fsdp::ShardingStrategy const& strategy) {
    using T = decltype(type);
    bool right = true;
    each_gradient(
        one_pass<fsdp::Fp32>(3, strategy, 0, travelling_in(fsdp::dtype_of<T>)), [&](auto const& term, float gradient) {
          float const sum = rounded<T>((rounded<T>(term(0, 0)) + rounded<T>(term(0, 1))) + rounded<T>(term(0, 2)));
          right = right && gradient == sum * (1.0f / 3.0f);
        });
    CHECK(right);
  };
  check(bf16{}, fsdp::FullShard{});
  check(bf16{}, fsdp::NoShard{});
  check(fp16{}, fsdp::FullShard{});
  check(fp16{}, fsdp::NoShard{});
}

TEST_CASE("micro-steps whose gradients wait are rounded once; those that reduce, once each", "[precision]") {
  auto const options = travelling_in(fsdp::DType::bf16);
  auto const round = [](float value) { return rounded<bf16>(value); };
  auto const tree = [](auto const& value) { return (value(0) + value(1)) + (value(2) + value(3)); };
  bool waiting = true, reducing = true, differ = false;
  auto const check_waiting = [&](fsdp::ShardingStrategy const& strategy) {
    each_gradient(one_pass<fsdp::Fp32>(4, strategy, 0, options, 2, Before::wait), [&](auto const& term, float got) {
      float const sum = round(tree([&](int rank) { return round(term(0, rank) + term(1, rank)); }));
      waiting = waiting && got == sum * 0.25f;
    });
  };
  check_waiting(fsdp::FullShard{});
  check_waiting(fsdp::NoShard{});
  each_gradient(one_pass<fsdp::Fp32>(4, fsdp::FullShard{}, 0, options, 2), [&](auto const& term, float got) {
    auto const sum_of = [&](int micro) { return round(tree([&](int rank) { return round(term(micro, rank)); })); };
    reducing = reducing && got == sum_of(0) * 0.25f + sum_of(1) * 0.25f;
    differ = differ || got != 0.25f * round(tree([&](int rank) { return round(term(0, rank) + term(1, rank)); }));
  });
  CHECK(waiting);
  CHECK(reducing);
  CHECK(differ);  // it makes a difference
}

TEST_CASE("sums within a group that wait for replicas wait in fp32, and travel to them in fp32", "[precision]") {
  auto const round = [](float value) { return rounded<bf16>(value); };
  bool right = true;
  each_gradient(
      one_pass<fsdp::Fp32>(4, fsdp::HybridShard<>{}, 2, travelling_in(fsdp::DType::bf16), 2, Before::sum_in_group),
      [&](auto const& term, float got) {
        auto const group = [&](int first) {
          auto const sum = [&](int micro) { return round(round(term(micro, first)) + round(term(micro, first + 1))); };
          return sum(0) + sum(1);
        };
        right = right && got == (group(0) + group(2)) * 0.25f;
      });
  CHECK(right);
}

TEST_CASE("gradients that are narrow already travel as they are", "[precision]") {
  CHECK(equal_bits(train<fsdp::Bf16Reduce>(fsdp::FullShard{}, 2, 0, {.reduce_dtype = fsdp::DType::bf16}),
                   train<fsdp::Bf16Reduce>(fsdp::FullShard{}, 2)));
  for (auto const type : {fsdp::DType::f32, fsdp::DType::f16}) {
    std::string message;
    try {
      train<fsdp::Bf16Reduce>(fsdp::FullShard{}, 1, 0, {.reduce_dtype = type});
    } catch (fsdp::ConfigError const& error) {
      message = error.what();
    }
    CHECK(message == "rank 0: reduce_dtype: backward writes bf16: expected bf16, got " + std::string(fsdp::name(type)));
  }
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
  fsdp::EngineOptions options;
  auto const check = [&](fsdp::ShardingStrategy const& strategy, int ranks, int shard_group) {
    auto const counts = [](auto& engine, auto& patches) {
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
    };
    CHECK(toy::on_patches<TestType>(strategy, ranks, shard_group, counts, options));
  };
  for (bool const travels_as_written : {true, false}) {
    if (!travels_as_written && !std::is_same_v<typename TestType::Reduce, float>) continue;
    if (!travels_as_written) options = travelling_in(fsdp::DType::f16);
    check(fsdp::FullShard{}, 2, 0);
    check(fsdp::NoShard{}, 2, 0);
    check(fsdp::FullShard{}, 1, 0);
    check(fsdp::HybridShard<>{}, 4, 2);
  }
}
