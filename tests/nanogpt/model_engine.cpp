// SPDX-License-Identifier: Apache-2.0
// The model on the real engine: strategies agree, training lowers the loss, evaluation and decoding may come in
// between.

#include <cmath>
#include <cstdint>
#include <mutex>
#include <vector>

#include "fsdp/comm/local.hpp"
#include "fsdp/fsdp.hpp"
#include "fsdp/host/device.hpp"
#include "gemm_host.hpp"
#include "gpt.hpp"
#include "tests/catch.hpp"

namespace {

using Device = fsdp::host::Device;

struct Outcome {
  std::vector<double> losses;  // one a step, summed over ranks
  std::vector<double> evaluations;
  std::vector<float> logits;
};

/// Trains a small model on a repeating text, `ranks` threads.
template <class S>
Outcome train(int ranks, bool interrupt, int steps = 8, bool recompute = false, int micro_steps = 2) {
  Outcome outcome;
  outcome.losses.assign(static_cast<std::size_t>(steps), 0);
  std::mutex merging;
  fsdp::local::run(ranks, Device{}, [&](fsdp::local::Communicator<Device> comm) {
    using Engine = fsdp::Engine<S, fsdp::local::Communicator<Device>>;
    fsdp::Mesh mesh(std::move(comm));
    Engine engine(mesh, {.prefetch = 1, .seed = 11});
    nanogpt::GptOptions options;
    options.seed = 100 + static_cast<std::uint64_t>(engine.rank());
    options.panel = 8;
    options.recompute = recompute;
    nanogpt::Gpt<Engine> model(engine, {3, 2, 32, 16, 23, 0.1f, true}, 2, 16, options);
    fsdp::AdamW adamw(engine, {.lr = 1e-2f, .weight_decay = 0.1f});

    std::vector<std::int32_t> tokens(32), targets(32);
    std::vector<double> losses;
    for (int step = 0; step < steps; ++step) {
      for (int micro = 0; micro < micro_steps; ++micro) {
        for (std::int32_t i = 0; i < 32; ++i) {
          auto const at = static_cast<std::size_t>(i);
          std::int32_t const place = i + step + 3 * engine.rank() + 5 * micro;
          tokens[at] = place % 23;
          targets[at] = (place + 1) % 23;
        }
        model.forward_backward(tokens.data(), targets.data(), 1.0 / micro_steps);
      }
      fsdp::clip_grad_norm(engine, 1.0f);
      adamw.step(1e-2f);
      losses.push_back(model.read_loss());
      if (!interrupt) continue;
      model.evaluate(tokens.data(), targets.data());
      model.evaluate(tokens.data(), targets.data());
      double const evaluation = model.read_evaluation();
      model.logits(tokens.data(), 5);
      auto const logits = model.extend(tokens.data(), 1);
      if (engine.rank() == 0) {
        outcome.evaluations.push_back(evaluation);
        outcome.logits = logits;
      }
    }
    std::lock_guard const lock(merging);
    for (std::size_t i = 0; i < losses.size(); ++i) outcome.losses[i] += losses[i];
  });
  return outcome;
}

}  // namespace

TEST_CASE("training lowers the loss from that of a uniform guess", "[nanogpt][model][engine]") {
  auto const outcome = train<fsdp::FullShard>(1, true, 40);
  CHECK(std::abs(outcome.losses.front() - std::log(23.0)) < 0.2);
  CHECK(outcome.losses.back() < 1.0);                         // the next token is a function of the last one
  CHECK(outcome.evaluations.back() < outcome.losses.back());  // no dropout
  for (auto const logit : outcome.logits) CHECK(std::isfinite(logit));
}

TEST_CASE("strategies train the model bit by bit alike", "[nanogpt][model][engine]") {
  // With several micro-steps FullShard reduces each, NoShard their sum: equal only in exact arithmetic.
  auto const expected = train<fsdp::NoShard>(2, false, 8, false, 1);
  CHECK(train<fsdp::FullShard>(2, false, 8, false, 1).losses == expected.losses);
  CHECK(train<fsdp::ShardGradOp>(2, false, 8, false, 1).losses == expected.losses);
}

TEST_CASE("evaluation and decoding leave training as it was", "[nanogpt][model][engine]") {
  CHECK(train<fsdp::FullShard>(2, true).losses == train<fsdp::FullShard>(2, false).losses);
}

TEST_CASE("recomputed layers give the same losses", "[nanogpt][model][engine]") {
  CHECK(train<fsdp::FullShard>(2, false, 4, true).losses == train<fsdp::FullShard>(2, false, 4, false).losses);
}
