// SPDX-License-Identifier: Apache-2.0
// Optimizers on shards against their formulas on whole tensors in double; weight decay per tensor; clipping the same
// everywhere.
//
// skip-sanitizers
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "tests/catch.hpp"
#include "tests/support/local_run.hpp"
#include "tests/support/shard_group.hpp"

namespace {

using Tensors = std::map<std::string, std::vector<float>>;

/// Parameters before and after one optimizer step, and the gradients of that step, on rank 0.
struct Step {
  Tensors before, gradients, after;
  std::map<std::string, bool> decays;
  double norm = 0.0;
};

template <class E>
Tensors exported(E& engine) {
  Tensors tensors;
  fsdp::export_full(engine, [&](fsdp::TensorInfo const& tensor, std::span<float const> values) {
    tensors[tensor.name].assign(values.begin(), values.end());
  });
  return tensors;
}

template <class E>
Tensors exported_gradients(E& engine) {
  Tensors tensors;
  fsdp::export_gradients(engine, [&](fsdp::TensorInfo const& tensor, std::span<float const> values) {
    tensors[tensor.name].assign(values.begin(), values.end());
  });
  return tensors;
}

Step one_step(fsdp::ShardingStrategy const& strategy, int ranks, float clip, fsdp::NormKind kind = fsdp::NormKind::l2,
              int shard_group = 0) {
  Step step;
  fsdp::local::run(ranks, fsdp::host::Device{}, [&](fsdp::local::Communicator<fsdp::host::Device> comm) {
    bool const first = comm.rank() == 0;
    fsdp::Mesh mesh(std::move(comm));
    auto engine = fsdp::Engine(mesh, fsdp::testing::in_groups_of(shard_group, strategy));
    toy::Network network(engine, {});
    fsdp::AdamW adamw(engine, {.beta2 = 0.99f, .weight_decay = 0.1f});
    Step mine;
    mine.before = exported(engine);
    network.step(0);
    fsdp::GradNorm<decltype(engine)> norm;
    if (clip > 0.0f) {
      norm = fsdp::clip_grad_norm(engine, clip, {.norm = kind});
      mine.norm = norm.value();
    }
    mine.gradients = exported_gradients(engine);
    adamw.step(0.05f, norm);
    mine.after = exported(engine);
    for (auto const& tensor : fsdp::tensor_list(engine)) mine.decays[tensor.name] = tensor.decay;
    if (first) step = std::move(mine);
  });
  return step;
}

double norm_of(Tensors const& gradients, fsdp::NormKind kind) {
  double sum = 0.0;
  for (auto const& [name, values] : gradients) {
    for (double const v : values) {
      if (kind == fsdp::NormKind::l2) sum += v * v;
      if (kind == fsdp::NormKind::l1) sum += std::abs(v);
      if (kind == fsdp::NormKind::inf) sum = std::max(sum, std::abs(v));
    }
  }
  return kind == fsdp::NormKind::l2 ? std::sqrt(sum) : sum;
}

}  // namespace

TEST_CASE("AdamW on shards is AdamW on whole tensors, with each tensor's own decay") {
  auto const step = one_step(fsdp::FullShard{}, 3, 0.0f);
  REQUIRE(step.before.size() == 14);
  int decayed = 0;
  for (auto const& [name, before] : step.before) {
    bool const decays = step.decays.at(name);
    CHECK(decays == (name.ends_with("table") || name.ends_with("up") || name.ends_with("down")));
    decayed += decays ? 1 : 0;
    auto const& gradient = step.gradients.at(name);
    auto const& after = step.after.at(name);
    for (std::size_t i = 0; i < before.size(); ++i) {
      double const g = gradient[i];
      double const first = 0.1 * g / (1.0 - 0.9), second = 0.01 * g * g / (1.0 - 0.99);
      double const expected =
          before[i] * (1.0 - 0.05 * (decays ? 0.1 : 0.0)) - 0.05 * first / (std::sqrt(second) + 1e-8);
      // A handful of fp32 roundings of terms of size |p| and lr.
      REQUIRE(std::abs(after[i] - expected) <= 1e-5 * 0.05 + 4e-7 * std::abs(before[i]));
    }
  }
  CHECK(decayed == 9);
}

TEST_CASE("gradients at equal parameters are, tensor by tensor, those of one rank on the concatenated batch") {
  auto const one = one_step(fsdp::FullShard{}, 1, 0.0f);
  auto const expect_equal = [&](Step const& step) {
    REQUIRE(step.gradients.size() == one.gradients.size());
    for (auto const& [name, expected] : one.gradients) {
      INFO(name);
      auto const& gradient = step.gradients.at(name);
      double difference = 0.0, norm = 0.0;
      for (std::size_t i = 0; i < expected.size(); ++i) {
        difference += std::pow(static_cast<double>(gradient[i]) - static_cast<double>(expected[i]), 2);
        norm += std::pow(static_cast<double>(expected[i]), 2);
      }
      REQUIRE(norm > 0.0);
      CHECK(std::sqrt(difference / norm) <= 1e-5);
    }
  };
  for (int const ranks : {2, 3, 4}) {
    expect_equal(one_step(fsdp::FullShard{}, ranks, 0.0f));
    expect_equal(one_step(fsdp::NoShard{}, ranks, 0.0f));
  }
  expect_equal(one_step(fsdp::HybridShard<>{}, 4, 0.0f, fsdp::NormKind::l2, 2));
}

TEST_CASE("the gradient norm is that of the whole gradient, equal for every strategy and world size") {
  auto const kind = GENERATE(fsdp::NormKind::l1, fsdp::NormKind::l2, fsdp::NormKind::inf);
  auto const one = one_step(fsdp::FullShard{}, 1, 1e9f, kind);
  CHECK(std::abs(one.norm - norm_of(one.gradients, kind)) <= 1e-12 * one.norm);
  for (int const ranks : {2, 3, 4}) {
    auto const full = one_step(fsdp::FullShard{}, ranks, 1e9f, kind);
    CHECK(std::abs(full.norm - norm_of(full.gradients, kind)) <= 1e-12 * full.norm);  // fp64 rounding
    CHECK(std::abs(full.norm - one.norm) <= 1e-5 * one.norm);  // fp32 gradients of another batch split
    CHECK(one_step(fsdp::NoShard{}, ranks, 1e9f, kind).norm == full.norm);
    CHECK(one_step(fsdp::ShardGradOp{}, ranks, 1e9f, kind).norm == full.norm);
  }
  CHECK(one_step(fsdp::HybridShard<>{}, 4, 1e9f, kind, 2).norm == one_step(fsdp::FullShard{}, 4, 1e9f, kind).norm);
}

TEST_CASE("clipping scales the step's gradients to the norm asked for") {
  auto const free_step = one_step(fsdp::FullShard{}, 2, 1e9f);
  auto const clip = static_cast<float>(free_step.norm / 4.0);
  double factor = 0.0;
  fsdp::local::run(2, fsdp::host::Device{}, [&](fsdp::local::Communicator<fsdp::host::Device> comm) {
    fsdp::Mesh mesh(std::move(comm));
    auto engine = fsdp::Engine(mesh, fsdp::FullShard{});
    toy::Network network(engine, {});
    fsdp::Sgd sgd(engine, {.lr = 1.0f});
    auto const before = exported(engine);
    network.step(0);
    auto const norm = fsdp::clip_grad_norm(engine, clip);
    auto const gradients = exported_gradients(engine);
    sgd.step(norm);
    auto const after = exported(engine);
    if (mesh.rank() != 0) return;
    double moved = 0.0;
    for (auto const& [name, values] : before)
      for (std::size_t i = 0; i < values.size(); ++i)
        moved += std::pow(static_cast<double>(values[i]) - after.at(name)[i], 2);
    factor = std::sqrt(moved) / norm_of(gradients, fsdp::NormKind::l2);
  });
  CHECK(std::abs(factor - 0.25) < 1e-4);
}

TEST_CASE("a norm that is not finite skips the step everywhere and is counted, or throws") {
  bool unchanged = false, threw = false;
  std::int64_t skipped = 0;
  fsdp::local::run(2, fsdp::host::Device{}, [&](fsdp::local::Communicator<fsdp::host::Device> comm) {
    bool const first = comm.rank() == 0;
    fsdp::Mesh mesh(std::move(comm));
    auto engine = fsdp::Engine(mesh, fsdp::FullShard{});
    toy::Network network(engine, {});
    fsdp::AdamW adamw(engine);
    auto const before = exported(engine);
    network.step(0);
    engine.synchronize();
    if (!first) engine.shards()[2].gradient[0] = NAN;  // on one rank alone
    auto const norm = fsdp::clip_grad_norm(engine, 1.0f);
    adamw.step(norm);
    auto const after = exported(engine);
    if (first) unchanged = before == after, skipped = norm.skipped();
    network.step(1);
    engine.synchronize();
    if (!first) engine.shards()[0].gradient[0] = INFINITY;
    try {
      static_cast<void>(fsdp::clip_grad_norm(engine, 1.0f, {.non_finite = fsdp::NonFinite::raise}));
    } catch (fsdp::Error const&) {
      if (first) threw = true;
    }
  });
  CHECK(unchanged);
  CHECK(skipped == 1);
  CHECK(threw);
}
