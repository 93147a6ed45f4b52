// SPDX-License-Identifier: Apache-2.0
// Adapters and frozen blocks on the real engine: the bits of a run whose optimizer leaves the frozen tensors out,
// gather memory, and merged weights.
//
// skip-tsan

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/fsdp.hpp"
#include "fsdp/full_state.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"
#include "nanogpt/model.hpp"
#include "tests/catch.hpp"
#include "tests/nanogpt/tunings.hpp"
#include "tests/support/descend.hpp"
#include "tests/support/sanitized.hpp"
#include "transformer/math/gemm_host.hpp"
#include "transformer/tuning/merged_weights.hpp"

namespace {

using Device = fsdp::host::Device;
using Comm = fsdp::local::Communicator<Device>;
using model_test::adapters;
using model_test::last;

struct Run {
  int ranks = 1;
  fsdp::ShardingStrategy strategy = fsdp::FullShard{};
  transformer::Tuning tuning{};
  bool unfrozen = false;  ///< all tensors have gradients, and the optimizer leaves the frozen ones out
  std::int64_t recompute = 0;
  int prefetch = 1;
};
using Weights = std::map<std::string, std::vector<float>>;
struct Result {
  Weights initial, weights;
  std::vector<float> logits;
  std::int64_t gather = 0;
};

nanogpt::GptConfig const config{3, 2, 32, 16, 23, 0.1f, true};

template <class E>
Weights weights_of(E& engine) {
  Weights all;
  fsdp::export_full(engine, [&](fsdp::TensorInfo const& tensor, std::span<float const> values) {
    all[tensor.name] = {values.begin(), values.end()};
  });
  return all;
}

Result train(Run const& of, Weights const& from = {}, int steps = 4) {
  Result result;
  fsdp::local::run(of.ranks, Device{}, [&](Comm comm) {
    bool const first = comm.rank() == 0;
    fsdp::Mesh mesh(std::move(comm));
    fsdp::Engine engine(mesh, of.strategy, {.prefetch = of.prefetch, .seed = 11});
    nanogpt::DecoderOptions options;
    options.panel = 8;
    options.recompute = of.recompute;
    options.tuning = of.tuning;
    nanogpt::Gpt model(engine, config, 2, config.block_size, options);
    auto const shards = engine.shards();
    std::vector<bool> left_out;
    for (std::size_t u = 0; u < shards.size(); ++u) left_out.push_back(shards[u].frozen);
    if (of.unfrozen)
      for (std::size_t u = 0; u < shards.size(); ++u) shards[u].frozen = false;
    shards.attach_optimizer();
    if (!from.empty())
      fsdp::import_shard(engine, [&](fsdp::TensorInfo const& tensor, std::int64_t at, std::span<float> out) {
        auto const found = from.find(tensor.name);
        if (found == from.end()) return false;
        for (auto& value : out) value = found->second[static_cast<std::size_t>(at++)];
        return true;
      });
    if (auto initial = weights_of(engine); first) result.initial = std::move(initial);
    std::vector<std::int32_t> tokens(2 * 16), targets(tokens.size());
    for (int step = 0; step < steps; ++step) {
      for (std::size_t i = 0; i < tokens.size(); ++i) {
        tokens[i] = (static_cast<std::int32_t>(i) + step + 3 * engine.rank()) % 23;
        targets[i] = (tokens[i] + 1) % 23;
      }
      model.forward_backward(tokens.data(), targets.data());
      fsdp::testing::descend(engine, left_out, 0.3f);
      engine.synchronize();
    }
    std::vector<std::int32_t> const text{1, 5, 9, 2, 7, 11, 3};
    auto logits = model.logits(text.data(), static_cast<std::int64_t>(text.size()));
    auto weights = weights_of(engine);
    if (!first) return;
    result.logits = std::move(logits);
    result.weights = std::move(weights);
    result.gather = memory_plan(engine.program(), engine.plan_input()).gather;
  });
  return result;
}

}  // namespace

TEST_CASE("fine-tuning has the bits of a run whose optimizer leaves the frozen tensors out", "[nanogpt][model]") {
  auto const pretrained = train({.ranks = 2}).weights;
  for (auto const& tuning : {adapters(8), last(1), last(2)})
    for (int const ranks : {1, 2, 3, 4})
      for (auto const& strategy :
           {fsdp::ShardingStrategy(fsdp::FullShard{}), fsdp::ShardingStrategy(fsdp::ShardGradOp{}),
            fsdp::ShardingStrategy(fsdp::NoShard{})}) {
        if (!fsdp::testing::next_cell()) continue;
        CAPTURE(tuning.lora_rank, tuning.last_layers, ranks, strategy.name);
        Run of{.ranks = ranks, .strategy = strategy, .tuning = tuning};
        auto const got = train(of, pretrained);
        of.unfrozen = true;
        CHECK(got.weights == train(of, pretrained).weights);
        CHECK(got.weights != got.initial);
        for (auto const& [name, values] : got.weights)
          if (!transformer::is_adapter(name) && !name.starts_with("transformer.h.2") &&
              !name.starts_with("transformer.h.1") && !name.starts_with("transformer.ln_f"))
            CHECK(values == pretrained.at(name));
        of.unfrozen = false, of.recompute = 3, of.prefetch = 2;
        CHECK(train(of, pretrained).weights == got.weights);
      }
}

TEST_CASE("the lowest layers frozen are the others trained, and all targets named are all", "[nanogpt][model]") {
  auto const pretrained = train({.ranks = 2}).weights;
  transformer::Tuning frozen;
  frozen.frozen_layers = 1;
  CHECK(train({.ranks = 2, .tuning = frozen}, pretrained).weights ==
        train({.ranks = 2, .tuning = last(2)}, pretrained).weights);
  auto named = adapters(8);
  named.lora_targets = {"c_attn", "c_proj", "mlp.c_fc"};
  auto const all = train({.ranks = 2, .tuning = adapters(8)}, pretrained, 1).weights;
  CHECK(train({.ranks = 2, .tuning = named}, pretrained, 1).weights == all);
  named.lora_targets = {"attn.c_attn", "c_fc"};
  std::size_t adapted = 0;
  for (auto const& [name, values] : train({.ranks = 2, .tuning = named}, pretrained, 1).weights) {
    if (!transformer::is_adapter(name)) continue;
    CHECK((name.find("c_attn") != name.npos || name.find("c_fc") != name.npos));
    ++adapted;
  }
  CHECK(adapted == 3 * 2 * 2);
  named.lora_targets = {"q_proj"};
  CHECK_THROWS_AS(train({.tuning = named}), fsdp::ConfigError);
}

TEST_CASE("gather memory of a model with adapters is that of base and adapters", "[nanogpt][model]") {
  auto const whole = train({.ranks = 2}, {}, 1), adapted = train({.ranks = 2, .tuning = adapters(8)}, {}, 1);
  std::int64_t adapter = 0;  // bytes of a block's
  for (auto const& [name, values] : adapted.weights)
    if (transformer::is_adapter(name) && name.starts_with("transformer.h.0."))
      adapter += static_cast<std::int64_t>(values.size()) * 4;
  auto const expected = whole.gather + 2 * adapter;  // two slots
  CHECK(adapted.gather >= expected);
  CHECK(static_cast<double>(adapted.gather) <= 1.05 * static_cast<double>(expected));
}

TEST_CASE("merged weights give the logits of a model with adapters", "[nanogpt][model]") {
  auto const tuned = train({.ranks = 2, .tuning = adapters(8)}, train({.ranks = 2}).weights, 8);
  transformer::MergedWeights merging(2.0f);
  Weights merged;
  for (auto const& [name, values] : tuned.weights)
    if (transformer::is_adapter(name)) {
      fsdp::TensorInfo info;
      info.name = name;
      auto const size = static_cast<std::int64_t>(values.size());
      info.shape = name.ends_with(transformer::lora_a) ? std::vector{std::int64_t{8}, size / 8}
                                                       : std::vector{size / 8, std::int64_t{8}};
      merging.keep(info, values);
    }
  for (auto const& [name, values] : tuned.weights) {
    if (transformer::is_adapter(name)) continue;
    auto const both = merging.merge(name, values);
    merged[name] = {both.begin(), both.end()};
  }
  CHECK(merged != tuned.initial);
  auto const plain = train({.ranks = 1}, merged, 0);
  REQUIRE(plain.logits.size() == tuned.logits.size());
  for (std::size_t i = 0; i < plain.logits.size(); ++i) CHECK(std::abs(plain.logits[i] - tuned.logits[i]) < 1e-5f);
}

TEST_CASE("a part of a matrix gets its part of the adapter", "[nanogpt][model]") {
  transformer::HostAdapter const adapter{2, 5, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, {1, 2, 3, 4, 5, 6}};
  std::vector<float> whole(15, 1.0f);
  adapter.add_to(whole, 0, 0.5f);
  CHECK(whole[0] == 1 + 0.5f * (1 * 1 + 2 * 6));
  CHECK(whole[14] == 1 + 0.5f * (5 * 5 + 6 * 10));
  for (std::int64_t first = 0; first < 15; ++first)
    for (std::int64_t count = 1; first + count <= 15; ++count) {
      std::vector<float> part(static_cast<std::size_t>(count), 1.0f);
      adapter.add_to(part, first, 0.5f);
      CHECK(std::equal(part.begin(), part.end(), whole.begin() + first));
    }
}
