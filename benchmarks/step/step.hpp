// SPDX-License-Identifier: Apache-2.0
// Training steps of a GPT on one rank: timed, then profiled by kernel.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "examples/nanogpt/model.hpp"
#include "fsdp/fsdp.hpp"
#include "fsdp/local.hpp"
#include "marks.hpp"
#include "profiled_device.hpp"
#include "report.hpp"
#include "settings.hpp"

namespace bench {

inline nanogpt::GptConfig gpt_config(StepSettings const& settings) {
  nanogpt::GptConfig config;
  config.n_layer = settings.n_layer;
  config.n_head = settings.n_head;
  config.n_embd = settings.n_embd;
  config.block_size = settings.block;
  config.vocab_size = settings.vocab_size;
  return config;
}

/// Largest resident set of this process so far, in bytes; 0 where the system does not tell.
inline std::int64_t largest_resident_set() {
  std::ifstream stream("/proc/self/status");
  for (std::string text; std::getline(stream, text);)
    if (text.starts_with("VmHWM:")) return std::stoll(text.substr(6)) * 1024;
  return 0;
}

template <class D>
std::int64_t memory_in_use(D const& device) {
  if constexpr (requires { device.memory(); }) {
    auto const bytes = device.memory();
    return static_cast<std::int64_t>(bytes.total - bytes.free);
  } else {
    return largest_resident_set();
  }
}

/// Token ids of some batches, equally likely: steps take them in turn.
class RandomTokens {
 public:
  static constexpr std::size_t batches = 4;

  RandomTokens(std::int64_t tokens, std::int64_t vocabulary)
      : tokens_(static_cast<std::size_t>(tokens)), ids_(2 * batches * tokens_) {
    for (std::size_t i = 0; i < ids_.size(); ++i)
      ids_[i] = static_cast<std::int32_t>(fsdp::rounding::mix(i + 1) % static_cast<std::uint64_t>(vocabulary));
  }
  std::int32_t const* inputs(std::size_t batch) const { return ids_.data() + 2 * (batch % batches) * tokens_; }
  std::int32_t const* targets(std::size_t batch) const { return inputs(batch) + tokens_; }

 private:
  std::size_t tokens_;
  std::vector<std::int32_t> ids_;
};

/// One rank that trains: no collectives, parameters whole. With a narrower type of computation they are cast in every
/// micro-step.
template <class D, class P>
class Rank {
 public:
  using Comm = fsdp::local::Communicator<D>;
  using Engine = fsdp::Engine<Comm, P>;

  Rank(Comm world, StepSettings const& settings)
      : settings_(settings),
        tokens_(settings.batch * settings.block, settings.vocab_size),
        mesh_(std::move(world)),
        engine_(mesh_, fsdp::NoShard{}),
        model_(engine_, gpt_config(settings), settings.batch, settings.block, nanogpt::decoder_options<D>()),
        adamw_(engine_, {.beta2 = 0.95f, .weight_decay = 0.1f}) {}
  Rank(Rank const&) = delete;
  Rank& operator=(Rank const&) = delete;

  /// Enqueues one optimizer step.
  void step() {
    for (std::int64_t micro = 0; micro < settings_.accumulate; ++micro, ++batch_) {
      auto const waits = engine_.no_sync(micro + 1 < settings_.accumulate);
      model_.forward_backward(tokens_.inputs(batch_), tokens_.targets(batch_),
                              1.0 / static_cast<double>(settings_.accumulate));
    }
    fsdp::GradNorm<Engine> norm;
    if (settings_.clip > 0) norm = fsdp::clip_grad_norm(engine_, static_cast<float>(settings_.clip));
    adamw_.step(6e-5f, norm);
  }
  void steps(std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) step();
  }
  Engine& engine() { return engine_; }
  nanogpt::Gpt<Engine>& model() { return model_; }

 private:
  StepSettings const& settings_;
  RandomTokens tokens_;
  std::size_t batch_ = 0;
  fsdp::Mesh<Comm> mesh_;
  Engine engine_;
  nanogpt::Gpt<Engine> model_;
  fsdp::AdamW<Engine> adamw_;
};

/// Times steps on a device as it is.
/// @note The host waits for the device twice: before the first timed step and after the last.
template <class D, class P>
void time_steps(fsdp::local::Communicator<D> world, StepSettings const& settings, StepFigures& figures) {
  using Clock = std::chrono::steady_clock;
  auto const device = world.device();
  Rank<D, P> rank(std::move(world), settings);
  auto& engine = rank.engine();
  auto const config = rank.model().config();
  auto const timed = static_cast<std::size_t>(settings.timed);
  Marks<D> marks(device, timed + 1);
  rank.steps(settings.burn_in);
  rank.model().read_loss();
  engine.synchronize();
  auto const begin = Clock::now();
  marks.set(engine.compute(), 0);
  for (std::size_t i = 0; i < timed; ++i) {
    rank.step();
    marks.set(engine.compute(), i + 1);
  }
  engine.synchronize();
  figures.seconds = std::chrono::duration<double>(Clock::now() - begin).count() / static_cast<double>(timed);

  std::vector<double> single(timed);
  for (std::size_t i = 0; i < timed; ++i) single[i] = marks.seconds(i, i + 1);
  std::sort(single.begin(), single.end());
  figures.median_seconds = 0.5 * (single[(timed - 1) / 2] + single[timed / 2]);
  figures.loss = rank.model().read_loss() / static_cast<double>(timed);
  figures.parameters = config.parameters();
  figures.flop = static_cast<double>(settings.batch * settings.block * settings.accumulate) * config.flop_per_token();
  figures.account_bytes = engine.account().reserved_total();
  figures.peak_bytes = memory_in_use(device);
  figures.needs =
      needs(config, settings.batch, settings.block, settings.accumulate, sizeof(typename P::Param), settings.clip > 0);
}

/// See [Note: Where the table of classes comes from].
template <class D, class P>
void take_apart(D const& device, StepSettings const& settings, StepFigures& figures) {
  using Comm = fsdp::local::Communicator<Profiled<D>>;
  Profile<D> profile(device);
  fsdp::local::run(1, Profiled<D>(device, profile), [&](Comm world) {
    Rank<Profiled<D>, P> rank(std::move(world), settings);
    rank.steps(2);
    auto const before = profile.seen();
    rank.step();
    rank.engine().synchronize();
    auto const calls = (profile.seen() - before + 16) * settings.profiled;
    profile.start(static_cast<std::size_t>(calls));  // marks are made before the steps
    Marks<D> marks(device, 2);
    marks.set(rank.engine().compute(), 0);
    rank.steps(settings.profiled);
    marks.set(rank.engine().compute(), 1);
    rank.engine().synchronize();
    figures.profiled_seconds = marks.seconds(0, 1) / static_cast<double>(settings.profiled);
    figures.lost = profile.lost();
    figures.kernels = profile.stop();
  });
}

/// @tparam P  precision policy
template <class P, class D>
void run_step(D const& device, std::string const& device_name, std::size_t cache, StepSettings const& settings) {
  StepFigures figures;
  figures.device = device_name;
  gpt_config(settings).validate();
  auto stream = device.make_stream("roof", fsdp::StreamPriority::normal);
  auto const roof = measure_roof<typename P::Param>(device, stream, settings, cache, device_name);
  fsdp::local::run(1, device,
                   [&](fsdp::local::Communicator<D> world) { time_steps<D, P>(std::move(world), settings, figures); });
  if (settings.profiled > 0) take_apart<D, P>(device, settings, figures);
  report_step(settings, roof, figures);
}

}  // namespace bench
