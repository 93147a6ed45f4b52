// SPDX-License-Identifier: Apache-2.0
// Controls of movement: what is gathered ahead, kept, or left waiting changes no result, with delays at every kernel
// and collective.
//
// skip-sanitizers
#include <cmath>
#include <cstring>
#include <functional>
#include <string>

#include "tests/catch.hpp"
#include "tests/support/backward_flags.hpp"
#include "tests/support/delayed.hpp"
#include "tests/support/local_run.hpp"
#include "tests/support/shard_group.hpp"

namespace {

using Local = fsdp::local::Communicator<fsdp::host::Device>;
using Comm = toy::Delayed<Local>;

/// Called before each micro-step with its number, of `micro_steps`.
using Control = std::function<void(int micro)>;

/// Trains 4 steps of 3 micro-steps on 4 ranks. `control(engine)` returns what is done before each micro-step.
/// @param most_delay  microseconds; each run has other delays
template <class MakeControl>
std::vector<float> train(fsdp::ShardingStrategy const& strategy, fsdp::EngineOptions options, MakeControl control,
                         int shard_group = 2, std::int64_t most_delay = 500) {
  static std::uint64_t seed = 0;
  ++seed;
  std::vector<float> result;
  fsdp::local::run(4, fsdp::host::Device{}, [&](Local comm) {
    bool const first = comm.rank() == 0;
    fsdp::Mesh<Comm> mesh(Comm(std::move(comm), seed, most_delay));
    fsdp::Engine<Comm> engine(mesh, fsdp::testing::in_groups_of(shard_group, strategy), options);
    toy::Shape shape;
    shape.hidden = {17, 40, 5, 31};
    toy::Network network(engine, shape);
    Control const before = control(engine);
    fsdp::AdamW adamw(engine, {.lr = 1e-2f, .weight_decay = 0.1f});
    for (std::int64_t step = 0; step < 4; ++step) {
      for (int micro = 0; micro < 3; ++micro) {
        before(micro);
        network.step(step * 3 + micro, 1.0f / 3.0f);
      }
      auto const norm = fsdp::clip_grad_norm(engine, 0.1f);
      adamw.step(norm);
    }
    auto parameters = toy::parameters(engine);
    if (first) result = std::move(parameters);
  });
  return result;
}

template <class E>
auto scopes_of(E& engine) {
  return std::make_shared<fsdp::testing::BackwardScopes<E>>(engine);
}
auto const nothing = [](auto&) { return Control([](int) {}); };

bool equal_bits(std::vector<float> const& a, std::vector<float> const& b) {
  return !a.empty() && a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

double difference(std::vector<float> const& a, std::vector<float> const& b) {
  double largest = a.size() == b.size() && !a.empty() ? 0.0 : INFINITY;
  for (std::size_t i = 0; i < a.size() && i < b.size(); ++i)
    largest = std::max(largest, std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i])));
  return largest;
}

}  // namespace

TEST_CASE("what is gathered ahead and kept does not change a bit") {
  auto const reference = train(fsdp::FullShard{}, {}, nothing, 2, 0);
  fsdp::EngineOptions options;
  SECTION("depths that differ") {
    options.prefetch = 3;
    options.backward_prefetch = 0;
    CHECK(equal_bits(train(fsdp::FullShard{}, options, nothing), reference));
  }
  SECTION("a cap on bytes ahead") {
    options.prefetch = 4;
    for (std::int64_t const cap : {1, 2048, 5000, 1 << 20}) {
      options.max_ahead_bytes = cap;
      CHECK(equal_bits(train(fsdp::FullShard{}, options, nothing), reference));
    }
  }
  SECTION("explicit lists, out of order too") {
    auto const lists = [](auto& engine) {
      using fsdp::UseId;
      engine.set_forward_prefetch(UseId{0}, {UseId{2}, UseId{1}});
      engine.set_forward_prefetch(UseId{1}, {UseId{4}});
      engine.set_backward_prefetch(UseId{4}, {UseId{1}});
      engine.set_backward_prefetch(UseId{3}, {});
      return Control([](int) {});
    };
    CHECK(equal_bits(train(fsdp::FullShard{}, {}, lists), reference));
    CHECK(equal_bits(train(fsdp::ShardGradOp{}, {}, lists), reference));
  }
  SECTION("a smaller group after forward") {
    for (bool const keep_last : {true, false}) {
      options.reshard_ranks = 2;
      options.keep_last = keep_last;
      CHECK(equal_bits(train(fsdp::FullShard{}, options, nothing), reference));
      CHECK(equal_bits(train(fsdp::HybridShard<fsdp::FullShard>{}, options, nothing, 4), reference));
    }
  }
  SECTION("parameters that stay between micro-steps") {
    auto const stay = [](auto& engine) {
      auto const scopes = scopes_of(engine);
      return Control([scopes](int micro) { scopes->keep_unsharded(micro != 2); });
    };
    CHECK(equal_bits(train(fsdp::ShardGradOp{}, {}, stay), reference));
    auto const always = [](auto& engine) {  // an optimizer step drops them all the same
      auto const scopes = scopes_of(engine);
      scopes->keep_unsharded(true);
      return Control([scopes](int) {});
    };
    CHECK(equal_bits(train(fsdp::ShardGradOp{}, {}, always), reference));
    CHECK(equal_bits(train(fsdp::NoShard{}, {}, always), train(fsdp::NoShard{}, {}, nothing)));
    options.allow_keep_unsharded = true;
    CHECK(equal_bits(train(fsdp::FullShard{}, options, always), reference));
  }
}

TEST_CASE("gradients that wait change the order of a sum alone") {
  auto const reference = train(fsdp::FullShard{}, {}, nothing, 2, 0);
  fsdp::EngineOptions options;
  options.allow_no_sync = true;
  auto const gradients = [](auto when) {
    return [when](auto& engine) {
      return Control([scopes = scopes_of(engine), when](int micro) { scopes->no_sync(!when(micro)); });
    };
  };
  auto const replicas = [](auto when) {
    return [when](auto& engine) {
      return Control([scopes = scopes_of(engine), when](int micro) { scopes->no_replica_sync(!when(micro)); });
    };
  };
  auto const last = [](int micro) { return micro == 2; };
  auto const not_second = [](int micro) { return micro != 1; };
  // AdamW moves a parameter by at most about its learning rate a step: an element whose gradient is all rounding error
  // may differ that much.
  double const tolerance = 2e-4;
  SECTION("for a reduction") {
    auto const once = train(fsdp::FullShard{}, options, gradients(last));
    CHECK(difference(once, reference) < tolerance);
    CHECK(equal_bits(train(fsdp::ShardGradOp{}, options, gradients(last)), once));
    CHECK(equal_bits(train(fsdp::NoShard{}, {}, gradients(last)), once));
    CHECK(equal_bits(train(fsdp::HybridShard<>{}, options, gradients(last)), once));
    auto const twice = train(fsdp::FullShard{}, options, gradients(not_second));
    CHECK(difference(twice, reference) < tolerance);
    CHECK_FALSE(equal_bits(twice, once));
    CHECK(equal_bits(train(fsdp::HybridShard<>{}, options, gradients(not_second)), twice));
    CHECK(difference(train(fsdp::NoShard{}, {}, gradients(not_second)), reference) < tolerance);
  }
  SECTION("for replicas") {
    options.allow_no_sync = false;
    options.allow_no_replica_sync = true;
    auto const each = train(fsdp::HybridShard<>{}, options, nothing);
    CHECK(equal_bits(each, reference));
    auto const once = train(fsdp::HybridShard<>{}, options, replicas(last));
    CHECK(difference(once, reference) < tolerance);
    CHECK_FALSE(equal_bits(once, reference));
    CHECK(equal_bits(train(fsdp::HybridShard<fsdp::ShardGradOp>{}, options, replicas(last)), once));
    CHECK(difference(train(fsdp::HybridShard<>{}, options, replicas(not_second)), reference) < tolerance);
    // Groups of one rank keep whole gradients: nothing is reduced until replicas are.
    CHECK(difference(train(fsdp::HybridShard<>{}, options, replicas(last), 1), reference) < tolerance);
    // One group: there are no replicas to wait for.
    CHECK(equal_bits(train(fsdp::HybridShard<>{}, options, replicas(last), 4), reference));
  }
}
