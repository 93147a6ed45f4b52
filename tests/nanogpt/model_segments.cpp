// SPDX-License-Identifier: Apache-2.0
// Layers that are recomputed together, in segments: the bits of a run that keeps all activations, as many gathers,
// activations to the byte.
//
// skip-sanitizers
// long
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/fsdp.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"
#include "nanogpt/model.hpp"
#include "tests/catch.hpp"
#include "tests/nanogpt/training.hpp"
#include "tests/nanogpt/tunings.hpp"
#include "transformer/math/gemm_host.hpp"

namespace {

using Device = fsdp::host::Device;
using Comm = fsdp::local::Communicator<Device>;
using model_test::adapters;
using model_test::last;
using model_test::TrainingRun;

constexpr std::int64_t depth = 6;
constexpr std::int64_t lengths[]{1, 2, 3, 4, depth};
nanogpt::GptConfig const config{depth, 2, 16, 8, 23, 0.1f, true};

TrainingRun short_run(int ranks) {
  TrainingRun run;
  run.ranks = ranks;
  run.steps = 2;
  run.micro_steps = 2;
  run.config = config;
  return run;
}

/// Compares runs with `recomputed` layers, in segments of any length, with one that keeps everything.
template <class P>
void compare(fsdp::ShardingStrategy const& strategy, TrainingRun run, std::vector<std::int64_t> const& recomputed) {
  std::optional<model_test::Outcome> kept;
  for (auto const layers : recomputed) {
    for (auto const segment : lengths) {
      if (segment > layers || !fsdp::testing::next_cell(11)) continue;
      if (!kept) kept = model_test::train<P>(strategy, Device{}, run);
      CAPTURE(strategy.name, run.ranks, run.prefetch, run.tuning.lora_rank, run.tuning.last_layers, layers, segment);
      run.recompute = layers;
      run.segment = segment;
      CHECK((model_test::train<P>(strategy, Device{}, run) == *kept));
    }
  }
}

/// Results of one rank of a model.
struct Sizes {
  std::int64_t activations = 0;
  fsdp::Counts forward, backward;
};
Sizes sizes_of(int ranks, nanogpt::DecoderOptions const& options,
               fsdp::ShardingStrategy const& strategy = fsdp::FullShard{}, int prefetch = 1) {
  Sizes sizes;
  fsdp::local::run(ranks, Device{}, [&](Comm comm) {
    bool const first = comm.rank() == 0;
    fsdp::Mesh mesh(std::move(comm));
    fsdp::Engine engine(mesh, strategy, {.prefetch = prefetch});
    nanogpt::Gpt model(engine, config, 2, config.block_size, options);
    engine.seal();
    if (!first) return;
    sizes.activations = engine.account().reserved(fsdp::MemoryTag::activations);
    sizes.forward = count(engine.program(), fsdp::PassKind::forward, fsdp::plain_step);
    sizes.backward = count(engine.program(), fsdp::PassKind::backward, fsdp::plain_step);
  });
  return sizes;
}
nanogpt::DecoderOptions recomputing(std::int64_t layers, std::int64_t segment) {
  nanogpt::DecoderOptions options;
  options.recompute = layers;
  options.segment = segment;
  return options;
}

/// Bytes of float buffers, which begin at multiples of 256 bytes.
std::int64_t bytes(std::int64_t elements) { return (elements * 4 + 255) / 256 * 256; }
/// The formula of docs/performance.md. @param inputs  residual streams that are kept  @param layers  the rest of a
/// layer
std::int64_t planned(std::int64_t inputs, std::int64_t layers) {
  std::int64_t const rows = 2 * config.block_size, width = config.n_embd, statistics = 4 * bytes(rows);
  return inputs * bytes(rows * width) +
         layers * (bytes(rows * 3 * width) + 2 * bytes(rows * width) + bytes(rows * 4 * width) + statistics) +
         2 * bytes(rows);
}

}  // namespace

TEST_CASE("segments of layers change no bit, under any strategy", "[nanogpt][model][segments]") {
  for (int const ranks : {1, 2, 3}) {
    for (auto const& strategy : {fsdp::ShardingStrategy(fsdp::FullShard{}), fsdp::ShardingStrategy(fsdp::ShardGradOp{}),
                                 fsdp::ShardingStrategy(fsdp::NoShard{})}) {
      compare<fsdp::Fp32>(strategy, short_run(ranks), {depth});
      compare<fsdp::Bf16>(strategy, short_run(ranks), {depth});
    }
  }
  auto run = short_run(4);
  run.shard_group = 2;
  compare<fsdp::Fp32>(fsdp::HybridShard<>{}, run, {depth});
}

TEST_CASE("segments change no bit with any prefetch, of some layers, and with evaluation in between",
          "[nanogpt][model][segments]") {
  for (int const prefetch : {0, 1, 2, 3}) {
    auto run = short_run(2);
    run.prefetch = prefetch;
    run.evaluate = prefetch == 2;
    compare<fsdp::Fp32>(fsdp::FullShard{}, run, {depth - 1});
  }
}

TEST_CASE("segments change no bit of adapters and above frozen layers", "[nanogpt][model][segments]") {
  for (auto const& tuning : {adapters(3), last(1), last(2), last(3), last(5)}) {
    for (int const prefetch : {0, 2}) {
      auto run = short_run(2);
      run.tuning = tuning;
      run.prefetch = prefetch;
      compare<fsdp::Fp32>(fsdp::FullShard{}, run, {depth, depth - 1, 3});
    }
    auto run = short_run(2);
    run.tuning = tuning;
    compare<fsdp::Bf16>(fsdp::ShardGradOp{}, run, {depth});
  }
}

TEST_CASE("segments change no bit when layers share units", "[nanogpt][model][segments]") {
  for (auto const& tuning : {transformer::Tuning{}, adapters(3), last(3), last(4)}) {
    auto run = short_run(2);
    run.tuning = tuning;
    run.unit_layers = 2;
    auto const kept = model_test::train<fsdp::Fp32>(fsdp::FullShard{}, Device{}, run);
    for (auto const segment : {1, 2, 4, 6}) {
      CAPTURE(tuning.lora_rank, tuning.last_layers, segment);
      run.recompute = depth;
      run.segment = segment;
      CHECK((model_test::train<fsdp::Fp32>(fsdp::FullShard{}, Device{}, run) == kept));
    }
  }
}

TEST_CASE("segments of layers gather each unit as often as without", "[nanogpt][model][segments]") {
  for (int const ranks : {1, 2}) {
    for (int const prefetch : {0, 1, 2, 3}) {
      for (auto const& tuning : {transformer::Tuning{}, adapters(3), last(2)}) {
        nanogpt::DecoderOptions options;
        options.tuning = tuning;
        auto const kept = sizes_of(ranks, options, fsdp::FullShard{}, prefetch);
        CHECK((ranks == 1 || kept.backward.all_gather.calls > 0));
        for (auto const segment : lengths) {
          CAPTURE(ranks, prefetch, tuning.lora_rank, tuning.last_layers, segment);
          auto in_segments = recomputing(depth, segment);
          in_segments.tuning = tuning;
          auto const sizes = sizes_of(ranks, in_segments, fsdp::FullShard{}, prefetch);
          CHECK((sizes.forward == kept.forward));
          CHECK((sizes.backward == kept.backward));
        }
      }
    }
  }
}

TEST_CASE("activations of segments have the planned bytes", "[nanogpt][model][segments]") {
  CHECK(sizes_of(1, recomputing(0, 1)).activations == planned(depth + 1, depth));
  // Inputs: one a segment, those inside a segment, and the output of the last layer. Layers: those of one segment.
  CHECK(sizes_of(1, recomputing(depth, 1)).activations == planned(6 + 0 + 1, 1));
  CHECK(sizes_of(1, recomputing(depth, 2)).activations == planned(3 + 1 + 1, 2));
  CHECK(sizes_of(1, recomputing(depth, 3)).activations == planned(2 + 2 + 1, 3));
  CHECK(sizes_of(1, recomputing(depth, 4)).activations == planned(2 + 3 + 1, 4));
  CHECK(sizes_of(1, recomputing(depth, depth)).activations == planned(depth + 1, depth));
  // Some layers are not recomputed.
  CHECK(sizes_of(1, recomputing(4, 2)).activations == planned(2 + 1 + 2 + 1, 2 + 2));
  CHECK(sizes_of(1, recomputing(5, 3)).activations == planned(2 + 2 + 1 + 1, 3 + 1));
  // Frozen layers share the buffers of one; their inputs are kept. Segments begin at the lowest layer that trains.
  auto frozen = recomputing(depth, 2);
  frozen.tuning = last(4);
  CHECK(sizes_of(1, frozen).activations == planned(2 + 2 + 1 + 1, 2));
  frozen.tuning = last(1);
  CHECK(sizes_of(1, frozen).activations == planned(5 + 1 + 1, 1));
  frozen.tuning = last(3);
  CHECK(sizes_of(1, frozen).activations == planned(3 + 2 + 1 + 1, 2));
}

TEST_CASE("segments that cut units are refused", "[nanogpt][model][segments]") {
  auto const refused = [](std::int64_t unit_layers, std::int64_t segment, std::int64_t layers = depth) {
    auto options = recomputing(layers, segment);
    options.unit_layers = unit_layers;
    try {
      sizes_of(1, options);
    } catch (fsdp::ConfigError const& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  CHECK(refused(2, 3).find("segments of 3 layers are recomputed, but units have 2 layers") != std::string::npos);
  CHECK(refused(0, 2).find("units have all layers, the embeddings and the head") != std::string::npos);
  CHECK(refused(1, 0).find("expected segments of at least one layer, got 0") != std::string::npos);
  CHECK(refused(2, 4).empty());
  CHECK(refused(0, 1).empty());
  CHECK(refused(0, depth).empty());  // nothing is recomputed
  CHECK(refused(3, 2, 2).empty());
}
