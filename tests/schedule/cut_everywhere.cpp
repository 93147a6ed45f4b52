// SPDX-License-Identifier: Apache-2.0
// An exception from any call of the device while two micro-steps are enqueued: once their gradients are discarded,
// nothing of them is left in the weights of the steps that follow, and no bytes count as in use.
// skip-sanitizers
#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/checkpoint/full_state.hpp"
#include "tests/catch.hpp"
#include "tests/support/ramp.hpp"
#include "tests/support/recording.hpp"

namespace {

using Recorded = fsdp::testing::RecordingDevice<fsdp::host::Device>;

/// Throws from call number `at`, counted from arm(); calls of the communicator do not count.
struct Cutting : Recorded {
  struct Cut : std::runtime_error {
    using std::runtime_error::runtime_error;
  };
  struct State {
    int calls = 0, at = 0;  ///< at 0: never
  };
  std::shared_ptr<State> state = std::make_shared<State>();

  Cutting() : Recorded() {}
  void arm(int at) const { *state = {0, at}; }
  void count() const {
    if (!recording->silent && ++state->calls == state->at) throw Cut(fmt::format("cut at call {}", state->at));
  }
  void copy_async(Stream& stream, void* to, void const* from, std::size_t bytes) const {
    count();
    Recorded::copy_async(stream, to, from, bytes);
  }
  void zero_async(Stream& stream, void* to, std::size_t bytes) const {
    count();
    Recorded::zero_async(stream, to, bytes);
  }
  template <class Kernel, class... Args>
  void launch(Stream& stream, std::int64_t blocks, Kernel kernel, Args... args) const {
    count();
    Recorded::launch(stream, blocks, kernel, args...);
  }
  void record(Event& event, Stream& stream) const {
    count();
    Recorded::record(event, stream);
  }
  void wait(Stream& stream, Event const& event, fsdp::WaitSite site) const {
    count();
    Recorded::wait(stream, event, site);
  }
};
using Comm = fsdp::testing::Recorder<fsdp::local::Communicator<Cutting>>;

struct Outcome {
  std::vector<float> weights;
  std::int64_t live = 0;
  bool cut = false;
};

/// A step, two micro-steps that are cut and discarded, and another step.
/// @param at  the call that throws on every rank; 0: there are no such micro-steps
template <class P, bool Sets>
Outcome train(fsdp::ShardingStrategy const& strategy, int ranks, fsdp::EngineOptions const& options, int at) {
  Outcome outcome;
  fsdp::local::run(
      ranks, [](int) { return Cutting{}; },
      [&](fsdp::local::Communicator<Cutting> comm) {
        auto const device = comm.device();
        fsdp::Mesh<Comm> mesh{Comm(std::move(comm))};
        fsdp::Engine<Comm, P> engine{mesh, strategy, options};
        using Sharded = fsdp::ShardedModule<fsdp::testing::Ramp<Sets>, fsdp::Engine<Comm, P>>;
        auto const root = engine.add_unit("root");
        std::vector<Sharded> layers;
        layers.push_back(engine.shard(fsdp::testing::Ramp<Sets>{300}, "tied", root));
        for (std::int64_t const elements : {70, 1000, 5})
          layers.push_back(engine.shard(fsdp::testing::Ramp<Sets>{elements}, fmt::format("layer.{}", layers.size())));
        layers.push_back(engine.shard(fsdp::testing::Ramp<Sets>{300}, "tied", root));
        fsdp::Sgd sgd{engine, {.lr = 1.0f}};
        auto const micro_step = [&](float by) {
          for (auto& layer : layers) layer.forward();
          for (auto i = layers.size(); i-- > 0;) layers[i].backward(by * static_cast<float>(i + 1));
        };
        auto const step = [&](float by) {
          micro_step(by);
          sgd.step();
        };
        step(0.5f);
        bool cut = false;
        if (at > 0) {
          device.arm(at);
          try {
            {
              auto const waits =
                  options.allow_no_sync ? engine.no_sync() : engine.no_replica_sync(options.allow_no_replica_sync);
              micro_step(512.0f);
            }
            micro_step(256.0f);
          } catch (Cutting::Cut const&) {
            cut = true;
          }
          device.arm(0);
          engine.discard_gradients();
        }
        step(0.25f);
        step(0.125f);
        engine.synchronize();
        std::vector<float> weights;
        fsdp::export_full(engine, [&](fsdp::TensorInfo const&, std::span<float const> values) {
          weights.insert(weights.end(), values.begin(), values.end());
        });
        if (mesh.rank() == 0) outcome = {std::move(weights), engine.account().live_state(), cut};
      });
  return outcome;
}

template <class P, bool Sets>
void check(fsdp::ShardingStrategy const& strategy, int ranks, fsdp::EngineOptions const& options) {
  auto const expected = train<P, Sets>(strategy, ranks, options, 0);
  int at = 0;
  for (bool cut = true; cut;) {
    auto const got = train<P, Sets>(strategy, ranks, options, ++at);
    cut = got.cut;
    CAPTURE(strategy.name, ranks, at);
    REQUIRE(got.weights.size() == expected.weights.size());
    REQUIRE(std::memcmp(got.weights.data(), expected.weights.data(), got.weights.size() * sizeof(float)) == 0);
    REQUIRE(got.live == expected.live);
  }
  CHECK(at > 15);
}

}  // namespace

TEST_CASE("micro-steps that end at any call of the device leave nothing: FullShard") {
  check<fsdp::Fp32, false>(fsdp::FullShard{}, 2, {});
  check<fsdp::Fp32, true>(fsdp::FullShard{}, 2, {.prefetch = 0, .allow_no_sync = true});
}
TEST_CASE("micro-steps that end at any call of the device leave nothing: accumulators, rounded gradients") {
  check<fsdp::Bf16Reduce, false>(fsdp::FullShard{}, 2, {.allow_no_sync = true});
  check<fsdp::Fp32, false>(fsdp::HybridShard<>{.group = 2}, 4, {.reduce_dtype = fsdp::DType::bf16});
}
TEST_CASE("micro-steps that end at any call of the device leave nothing: replicas that wait, kept slices, buckets") {
  check<fsdp::Fp32, false>(fsdp::HybridShard<>{.group = 2}, 4, {.allow_no_replica_sync = true});
  check<fsdp::Fp32, false>(fsdp::FullShard{}, 4, {.keep_last = false, .reshard_ranks = 2});
  check<fsdp::Fp32, true>(fsdp::NoShard{}, 2, {.bucket_bytes = 3000, .first_bucket_bytes = 700});
}
