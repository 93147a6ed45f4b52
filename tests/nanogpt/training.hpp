// SPDX-License-Identifier: Apache-2.0
// A short training run of a model, for tests of precisions, strategies and devices.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "fsdp/fsdp.hpp"
#include "fsdp/local.hpp"
#include "nanogpt/model.hpp"
#include "tests/catch.hpp"
#include "tests/support/shard_group.hpp"

namespace model_test {

struct TrainingRun {
  int ranks = 1;
  int shard_group = 0;
  int steps = 8;
  int micro_steps = 1;
  std::int64_t batch = 2;          ///< sequences of a rank and micro-step
  std::vector<std::int32_t> text;  ///< to train on; empty: a short text that repeats itself
  float lr = 1e-2f;
  bool evaluate = false;   ///< after every step
  bool interrupt = false;  ///< evaluate and decode after every step
  std::int64_t recompute = 0;
  std::int64_t segment = 1;
  std::int64_t unit_layers = 1;
  int prefetch = 1;
  transformer::Tuning tuning{};
  nanogpt::GptConfig config{3, 2, 32, 16, 23, 0.1f, true};
};

struct Outcome {
  std::vector<double> losses;  // one a step, summed over ranks
  std::vector<double> evaluations;
  std::vector<float> logits;
  std::vector<float> weights;  // of the masters, after the last step

  bool operator==(Outcome const&) const = default;
};

/// Ranks are threads on one device.
/// @tparam S  strategy    @tparam P  precision
template <class P, class D>
Outcome train(fsdp::ShardingStrategy const& strategy, D const& device, TrainingRun const& run) {
  Outcome outcome;
  outcome.losses.assign(static_cast<std::size_t>(run.steps), 0);
  std::mutex merging;
  fsdp::local::run(run.ranks, device, [&](fsdp::local::Communicator<D> comm) {
    using Engine = fsdp::Engine<fsdp::local::Communicator<D>, P>;
    fsdp::Mesh mesh(std::move(comm));
    Engine engine(mesh, fsdp::testing::in_groups_of(run.shard_group, strategy), {.prefetch = run.prefetch, .seed = 11});
    nanogpt::DecoderOptions options;
    options.seed = 100 + static_cast<std::uint64_t>(engine.rank());
    options.panel = 8;
    options.logits_elements = 12 * run.config.padded_vocab();  // several parts
    options.recompute = run.recompute;
    options.segment = run.segment;
    options.unit_layers = run.unit_layers;
    options.tuning = run.tuning;
    auto const length = run.config.block_size;
    nanogpt::Gpt<Engine> model(engine, run.config, run.batch, length, options);
    fsdp::AdamW adamw(engine, {.lr = run.lr, .weight_decay = 0.1f});

    auto const words = static_cast<std::int32_t>(run.config.vocab_size);
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(run.batch * length)), targets(tokens.size());
    std::vector<double> losses;
    for (int step = 0; step < run.steps; ++step) {
      for (int micro = 0; micro < run.micro_steps; ++micro) {
        for (std::size_t i = 0; i < tokens.size(); ++i) {
          std::int32_t const place = static_cast<std::int32_t>(i) + step + 3 * engine.rank() + 5 * micro;
          tokens[i] = place % words;
          targets[i] = (place + 1) % words;
          if (run.text.empty()) continue;
          auto const sequence = static_cast<std::uint64_t>(step) * static_cast<std::uint64_t>(run.batch) +
                                i / static_cast<std::size_t>(length);  // windows far apart, of one rank and micro-step
          auto const at = sequence * 0x9e3779b97f4a7c15u % (run.text.size() - static_cast<std::size_t>(length)) +
                          i % static_cast<std::size_t>(length);
          tokens[i] = run.text[at];
          targets[i] = run.text[at + 1];
        }
        model.forward_backward(tokens.data(), targets.data(), 1.0 / run.micro_steps);
      }
      auto const norm = fsdp::clip_grad_norm(engine, 1.0f);
      adamw.step(run.lr, norm);
      losses.push_back(model.read_loss());
      if (!run.interrupt && !run.evaluate) continue;
      model.evaluate(tokens.data(), targets.data());
      model.evaluate(tokens.data(), targets.data());
      double const evaluation = model.read_evaluation();
      if (engine.rank() == 0) outcome.evaluations.push_back(evaluation);
      if (!run.interrupt) continue;
      model.logits(tokens.data(), 5);
      auto const logits = model.extend(tokens.data(), 1);
      if (engine.rank() == 0) outcome.logits = logits;
    }
    fsdp::export_full(engine, [&](fsdp::TensorInfo const&, std::span<float const> values) {
      outcome.weights.insert(outcome.weights.end(), values.begin(), values.end());  // on rank 0 alone
    });
    std::lock_guard const lock(merging);
    for (std::size_t i = 0; i < losses.size(); ++i) outcome.losses[i] += losses[i];
  });
  return outcome;
}

/// The largest difference of two runs' losses, relative to those of the second; infinity if their numbers differ.
inline double loss_difference(Outcome const& run, Outcome const& reference) {
  if (run.losses.size() != reference.losses.size()) return HUGE_VAL;
  double largest = 0;
  for (std::size_t i = 0; i < run.losses.size(); ++i) {
    double const difference = std::abs(run.losses[i] / reference.losses[i] - 1);
    largest = difference <= largest ? largest : difference;  // NaN gets through
  }
  return largest;
}

/// Steps of a model with two heads of 64, whose widths fill 16-byte accesses; the vocabulary does not.
inline TrainingRun aligned_run(std::int64_t length, int steps) {
  TrainingRun run;
  run.steps = steps;
  run.lr = 1e-3f;
  run.interrupt = true;
  run.config = {2, 2, 128, length, 65, 0.1f, true};
  return run;
}

/// Losses and evaluations within `relative`, logits within `absolute`.
inline void check_alike(Outcome const& got, Outcome const& expected, double relative, float absolute) {
  double const difference = loss_difference(got, expected);
  INFO("largest relative difference of the losses: " << difference);
  CHECK(difference < relative);
  REQUIRE(got.evaluations.size() == expected.evaluations.size());
  for (std::size_t i = 0; i < got.evaluations.size(); ++i)
    CHECK(std::abs(got.evaluations[i] / expected.evaluations[i] - 1) < relative);
  REQUIRE(got.logits.size() == expected.logits.size());
  for (std::size_t i = 0; i < got.logits.size(); ++i) CHECK(std::abs(got.logits[i] - expected.logits[i]) < absolute);
  CHECK(got.losses.back() < 0.9 * got.losses.front());
}

}  // namespace model_test
