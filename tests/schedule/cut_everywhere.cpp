// SPDX-License-Identifier: Apache-2.0
// An exception from any call of the device while two micro-steps are enqueued: once their gradients are discarded,
// nothing of them is left in the weights of the steps that follow, and no bytes count as in use.
// skip-sanitizers
// full-run: [cuts]
// timeout: 3600
#include <fmt/format.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "fsdp/full_state.hpp"
#include "tests/catch.hpp"
#include "tests/support/backward_flags.hpp"
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

/// Doubles reduced gradients.
struct Double {
  template <class Block>
  FSDP_HD void operator()(Block const& block, std::int64_t, float* gradients, std::int64_t count) const {
    block.update(
        count, [](float& gradient) { gradient *= 2.0f; }, gradients);
  }
  /// For a recording device.
  template <class Accesses>
  static void access(Accesses& a, float* gradients, std::int64_t count) {
    a.read_and_write(gradients, count);
  }
};

/// Which modules set their gradients.
enum class Sets { none, all, every_second };

/// An engine, and the micro-steps that are cut.
struct Declaration {
  fsdp::ShardingStrategy strategy = fsdp::FullShard{};
  int ranks = 1;
  fsdp::EngineOptions options{};
  Sets sets{};
  bool tied = true;                            ///< the first unit is used last, too
  int replicated = 0;                          ///< this unit is kept whole by every rank, counted from 1; 0: none
  bool evaluates = false;                      ///< after each micro-step, in the middle of a forward pass
  std::array<fsdp::BackwardFlags, 2> flags{};  ///< of the micro-steps; what the options do not allow is left out
};

struct Outcome {
  std::vector<float> weights;
  std::int64_t live = 0;
  bool cut = false;
};

/// A step, two micro-steps that are cut and discarded, and two more steps.
/// @param at  the call that throws on every rank; 0: there are no such micro-steps
template <class P>
Outcome train(Declaration const& declared, int at) {
  Outcome outcome;
  fsdp::local::run(
      declared.ranks, [](int) { return Cutting{}; },
      [&](fsdp::local::Communicator<Cutting> comm) {
        using E = fsdp::Engine<Comm, P>;
        using Adds = fsdp::ShardedModule<fsdp::testing::Ramp<false>, E>;
        using Stores = fsdp::ShardedModule<fsdp::testing::Ramp<true>, E>;
        auto const device = comm.device();
        fsdp::Mesh<Comm> mesh{Comm(std::move(comm))};
        E engine{mesh, declared.strategy, declared.options};
        std::vector<std::variant<Adds, Stores>> layers;
        auto const shard = [&](std::int64_t elements, std::string const& name, bool sets, auto const& unit) {
          if (sets) {
            layers.push_back(engine.shard(fsdp::testing::Ramp<true>{elements}, name, unit));
          } else {
            layers.push_back(engine.shard(fsdp::testing::Ramp<false>{elements}, name, unit));
          }
        };
        int units = 0;
        auto const next_strategy = [&] {
          return ++units == declared.replicated ? fsdp::ShardingStrategy(fsdp::NoShard{}) : declared.strategy;
        };
        bool const sets = declared.sets == Sets::all;
        std::optional<fsdp::UnitId> root;
        if (declared.tied) {
          root = engine.add_unit("root", next_strategy());
          shard(300, "tied", sets, *root);
        }
        for (std::int64_t const elements : {70, 1000, 5})
          shard(elements, fmt::format("layer.{}", layers.size()),
                sets || (declared.sets == Sets::every_second && layers.size() % 2 == 1), next_strategy());
        if (declared.tied) shard(300, "tied", sets, *root);
        for (std::size_t u = 0; u < engine.shards().size(); u += 2)
          engine.shards().on_reduced(engine.shards()[u], [device](auto& stream, std::span<float> gradients) {
            device.launch(stream, std::int64_t{1}, Double{}, gradients.data(), std::ssize(gradients));
          });
        fsdp::Sgd sgd{engine, {.lr = 1.0f}};
        auto const forward = [&](std::size_t count) {
          for (std::size_t i = 0; i < count; ++i) std::visit([](auto& layer) { layer.forward(); }, layers[i]);
        };
        auto const micro_step = [&](float by) {
          forward(layers.size());
          for (auto i = layers.size(); i-- > 0;)
            std::visit([&](auto& layer) { layer.backward(by * static_cast<float>(i + 1)); }, layers[i]);
        };
        auto const step = [&](float by) {
          micro_step(by);
          sgd.step();
        };
        step(0.5f);
        bool cut = false;
        if (at > 0) {
          auto const input = engine.plan_input();
          auto const allowed = [&](fsdp::BackwardFlags flags) {
            return missing_option(engine.program(), input, flags).option.empty();
          };
          fsdp::testing::BackwardScopes<E> scopes(engine);
          device.arm(at);
          try {
            for (auto const [gradient_sync, replica_sync, reshard] : declared.flags) {
              scopes.no_sync(!gradient_sync && allowed({false, true, true}));
              scopes.no_replica_sync(!replica_sync && allowed({true, false, true}));
              scopes.keep_unsharded(!reshard && allowed({true, true, false}));
              micro_step(512.0f);
              if (!declared.evaluates) continue;
              forward(2);
              auto const evaluation = engine.evaluation();
              forward(layers.size());
            }
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

/// Cuts at each call in turn. @return the number of calls
template <class P>
int check(Declaration const& declared) {
  auto const expected = train<P>(declared, 0);
  int at = 0;
  for (bool cut = true; cut;) {
    auto const got = train<P>(declared, ++at);
    cut = got.cut;
    CAPTURE(declared.strategy.name, declared.ranks, at);
    REQUIRE(got.weights.size() == expected.weights.size());
    REQUIRE(std::memcmp(got.weights.data(), expected.weights.data(), got.weights.size() * sizeof(float)) == 0);
    REQUIRE(got.live == expected.live);
  }
  return at;
}
template <class P>
void check(fsdp::ShardingStrategy const& strategy, int ranks, fsdp::EngineOptions const& options,
           Sets sets = Sets::none) {
  Declaration declared{strategy, ranks, options, sets};
  // The first micro-step reduces as little as it may.
  declared.flags[0] = {!options.allow_no_sync, !options.allow_no_replica_sync, true};
  CHECK(check<P>(declared) > 15);
}

Declaration drawn(std::mt19937& random) {
  auto const below = [&](unsigned count) { return static_cast<int>(random() % count); };
  auto const yes = [&] { return below(2) == 0; };
  Declaration declared;
  declared.ranks = 1 + below(4);
  auto const group = declared.ranks % 2 == 0 ? declared.ranks / 2 : declared.ranks;
  switch (below(5)) {
    case 0: declared.strategy = fsdp::FullShard{}; break;
    case 1: declared.strategy = fsdp::ShardGradOp{}; break;
    case 2: declared.strategy = fsdp::HybridShard<>{.group = group}; break;
    case 3: declared.strategy = fsdp::HybridShard<fsdp::ShardGradOp>{.group = group}; break;
    default: declared.strategy = fsdp::NoShard{};
  }
  auto& options = declared.options;
  options.prefetch = below(4);
  options.keep_last = yes();
  options.keep_root = yes();
  auto const shards = declared.strategy.grouped ? group : declared.ranks;
  if (shards == 4 && declared.strategy.reshards_after_forward && yes()) options.reshard_ranks = 2;
  options.allow_no_sync = yes();
  options.allow_no_replica_sync = declared.strategy.grouped && yes();
  options.allow_keep_unsharded = yes() && options.reshard_ranks == 0;
  if (yes()) options.bucket_bytes = 3000, options.first_bucket_bytes = 700;
  declared.sets = static_cast<Sets>(below(3));
  declared.tied = yes();
  declared.replicated = yes() ? 1 + below(3) : 0;
  declared.evaluates = yes();
  for (auto& flags : declared.flags) flags = {yes(), yes(), yes()};
  return declared;
}
/// Declarations at random; each is cut at all calls of the device. @return the number of cuts
int check_at_random(unsigned first_seed, int count) {
  int cuts = 0;
  for (unsigned seed = first_seed; seed < first_seed + static_cast<unsigned>(count); ++seed) {
    CAPTURE(seed);
    std::mt19937 random(seed);
    auto declared = drawn(random);
    auto& reduces_in = declared.options.reduce_dtype;
    switch (random() % 5) {
      case 0: cuts += check<fsdp::Fp32>(declared); break;
      case 1: cuts += check<fsdp::Bf16>(declared); break;
      case 2: cuts += check<fsdp::Bf16Reduce>(declared); break;
      case 3:
        reduces_in = fsdp::DType::bf16;
        cuts += check<fsdp::Fp32>(declared);
        break;
      default: reduces_in = fsdp::DType::f16; cuts += check<fsdp::Bf16>(declared);
    }
  }
  return cuts;
}

}  // namespace

TEST_CASE("micro-steps that end at any call of the device leave nothing: FullShard") {
  check<fsdp::Fp32>(fsdp::FullShard{}, 2, {});
  check<fsdp::Fp32>(fsdp::FullShard{}, 2, {.prefetch = 0, .allow_no_sync = true}, Sets::all);
}
TEST_CASE("micro-steps that end at any call of the device leave nothing: accumulators, rounded gradients") {
  check<fsdp::Bf16Reduce>(fsdp::FullShard{}, 2, {.allow_no_sync = true});
  check<fsdp::Fp32>(fsdp::HybridShard<>{.group = 2}, 4, {.reduce_dtype = fsdp::DType::bf16});
}
TEST_CASE("micro-steps that end at any call of the device leave nothing: replicas that wait, kept slices, buckets") {
  check<fsdp::Fp32>(fsdp::HybridShard<>{.group = 2}, 4, {.allow_no_replica_sync = true});
  check<fsdp::Fp32>(fsdp::FullShard{}, 4, {.keep_last = false, .reshard_ranks = 2});
  check<fsdp::Fp32>(fsdp::NoShard{}, 2, {.bucket_bytes = 3000, .first_bucket_bytes = 700}, Sets::all);
}
TEST_CASE("micro-steps that end at any call of the device leave nothing: declarations at random") {
  CHECK(check_at_random(1, 5) > 5 * 15);
}
TEST_CASE("micro-steps that end at any call of the device leave nothing: many more", "[.][cuts]") {
  CHECK(check_at_random(1000, 500) > 500 * 15);
}
