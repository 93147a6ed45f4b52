// SPDX-License-Identifier: Apache-2.0
// An exception in a module, or in a task of its stream, reaches the caller of the pass, and its peers by name.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fsdp/scopes.hpp"
#include "tests/catch.hpp"
#include "tests/support/ramp.hpp"

namespace {

using fsdp::host::Stream;
using fsdp::testing::Ramp;
using Comm = fsdp::local::Communicator<fsdp::host::Device>;
using Engine = fsdp::Engine<Comm>;
using Layers = std::vector<fsdp::ShardedModule<Ramp<>, Engine>>;

void throw_in_task(Stream& stream) {
  stream.enqueue([] { throw std::domain_error("boom"); });
}
void throw_in_task_and_wait(Stream& stream) {
  throw_in_task(stream);
  stream.synchronize();
}
void throw_here(Stream&) { throw std::domain_error("boom"); }
struct NoStandardException {};
void throw_other_in_task(Stream& stream) {
  stream.enqueue([] { throw NoStandardException{}; });
}

/// Text for an exception that has none. A rank that meets the failure on another of its streams gets an fsdp::Error
/// that says the same.
constexpr char const* nameless = "an exception that is no std::exception";

std::string text_of(std::exception_ptr const& error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (std::exception const& known) {
    return known.what();
  } catch (NoStandardException const&) {
    return nameless;
  }
  return {};
}

/// Exceptions of `body`, by rank. `body` gets a function to call with the stream: it fails on rank 1 of 3.
std::vector<std::string> errors_of(std::function<void(Engine&, Layers&, Ramp<>::Before const&)> const& body,
                                   Ramp<>::Before const& fail) {
  std::vector<std::string> errors(3);
  try {
    fsdp::local::run(3, fsdp::host::Device{}, [&](Comm comm) {
      fsdp::Mesh mesh(std::move(comm));
      Engine engine(mesh, fsdp::FullShard{});
      auto layers = engine.shard(std::vector<Ramp<>>(3), "layer");
      try {
        body(engine, layers, mesh.rank() == 1 ? fail : Ramp<>::Before{});
        engine.synchronize();
        static_cast<void>(engine.mean_over_ranks({1.0}));
      } catch (...) {
        errors[static_cast<std::size_t>(mesh.rank())] = text_of(std::current_exception());
        throw;
      }
    });
  } catch (...) {
    auto const first = text_of(std::current_exception());
    CHECK((first == "boom" || first == nameless));
  }
  return errors;
}

/// A task that throws when it is told to.
void throw_when(Stream& stream, std::atomic<bool> const& fails) {
  stream.enqueue([&fails] {
    while (!fails) std::this_thread::yield();
    throw std::domain_error("boom");
  });
}
void await(std::atomic<bool> const& flag) {
  while (!flag) std::this_thread::yield();
}

/// Rank 1's gather stream fails while the rank is in `act`, which waits for rank 0; rank 0 ends then.
/// @return what rank 1 is told
std::string told_in(std::function<void(Engine&, fsdp::Sgd<Engine>&)> const& act) {
  std::atomic<bool> waits{false}, fails{false}, ended{false};
  Stream* gather = nullptr;
  std::string told;
  fsdp::local::run(2, fsdp::host::Device{}, [&](Comm comm) {
    fsdp::Mesh mesh(std::move(comm));
    Engine engine(mesh, fsdp::FullShard{});
    auto layer = engine.shard(Ramp<>{}, "layer");
    fsdp::Sgd sgd(engine);
    layer.forward();
    layer.backward(1.0f);
    if (mesh.rank() == 0) {
      await(waits);
      std::this_thread::sleep_for(std::chrono::milliseconds{20});
      fails = true;
      while (gather->failure() == nullptr) std::this_thread::yield();
      ended = true;
      return;
    }
    gather = &engine.shards().gather_stream();
    throw_when(*gather, fails);
    waits = true;
    try {
      act(engine, sgd);
    } catch (...) {
      told = text_of(std::current_exception());
    }
    await(ended);
  });
  return told;
}

void forward(Layers& layers, Ramp<>::Before const& in_second) {
  layers[0].forward();
  layers[1].forward(in_second);
  layers[2].forward();
}
void backward(Layers& layers, Ramp<>::Before const& in_second) {
  layers[2].backward(1.0f);
  layers[1].backward(1.0f, in_second);
  layers[0].backward(1.0f);
}

}  // namespace

TEST_CASE("an exception on one rank reaches its caller, and names the rank to the others") {
  std::vector<std::pair<std::string, std::function<void(Engine&, Layers&, Ramp<>::Before const&)>>> const places{
      {"forward", [](Engine&, Layers& layers, auto const& fail) { forward(layers, fail); }},
      {"backward",
       [](Engine&, Layers& layers, auto const& fail) {
         forward(layers, {});
         backward(layers, fail);
       }},
      {"evaluation",
       [](Engine& engine, Layers& layers, auto const& fail) {
         auto const evaluation = engine.evaluation();
         forward(layers, fail);
       }},
      {"between the scopes of an evaluation",
       [](Engine& engine, Layers& layers, auto const& fail) {
         auto const evaluation = engine.evaluation();
         forward(layers, {});
         if (fail) fail(engine.compute());
       }},
      {"while traced",
       [](Engine& engine, Layers& layers, auto const& fail) {
         if (engine.tracer() == nullptr) engine.start_trace(1000);
         forward(layers, fail);
         backward(layers, fail);
       }},
  };
  std::vector<std::pair<std::string, Ramp<>::Before>> const ways{
      {"on the calling thread", throw_here},
      {"in a task, awaited", throw_in_task_and_wait},
      {"in a task", throw_in_task},
      {"no standard exception, in a task", throw_other_in_task},
  };
  for (auto const& [place, body] : places) {
    for (auto const& [way, fail] : ways) {
      INFO(place << ", " << way);
      auto const errors = errors_of(body, fail);
      CHECK(errors[1] == (way[0] == 'n' ? nameless : "boom"));
      for (auto const rank : {0u, 2u}) {
        INFO(errors[rank]);
        CHECK(errors[rank].find("rank 1") != std::string::npos);
      }
    }
  }
}

TEST_CASE("a rank whose peers end, while it waits for them, throws why its own stream has failed") {
  CHECK(told_in([](Engine& engine, auto&) { static_cast<void>(engine.mean_over_ranks({1.0})); }) == "boom");
  CHECK(told_in([](Engine& engine, auto&) { static_cast<void>(fsdp::clip_grad_norm(engine, 1.0f)); }) == "boom");
  CHECK(told_in([](Engine&, auto& sgd) { sgd.step(); }) == "boom");
}

TEST_CASE("a rank that catches its failure names it to its peers, and who has caught that is not told again") {
  std::atomic<bool> fails{true}, caught{false};
  std::vector<std::string> told(2);
  CHECK_NOTHROW(fsdp::local::run(2, fsdp::host::Device{}, [&](Comm comm) {
    fsdp::Mesh mesh(std::move(comm));
    Engine engine(mesh, fsdp::FullShard{});
    auto layer = engine.shard(Ramp<>{}, "layer");
    layer.forward();
    bool const failing = mesh.rank() == 1;
    if (failing) {
      throw_when(engine.compute(), fails);
    } else {  // as a collective does that this rank's stream comes to later than its host
      engine.shards().gather_stream().enqueue([&] {
        await(caught);
        throw fsdp::PeerError("rank 1 failed: boom");
      });
    }
    try {
      if (failing) engine.synchronize();
      static_cast<void>(engine.mean_over_ranks({1.0}));
    } catch (...) {
      told[static_cast<std::size_t>(mesh.rank())] = text_of(std::current_exception());
    }
    if (!failing) caught = true;
  }));
  CHECK(told[1] == "boom");
  CHECK(told[0] == "rank 0: rank 1 failed: boom");
}

TEST_CASE("destructors survive a stream that has failed, and nothing else goes on with it") {
  for (auto const& fail : {throw_in_task, throw_other_in_task}) {
    auto compute = std::make_optional<Stream>("compute");
    fsdp::local::run(1, fsdp::host::Device{}, [&](Comm comm) {
      fsdp::Mesh mesh(std::move(comm));
      Engine engine(mesh, fsdp::FullShard{}, {}, *compute);
      auto layer = engine.shard(Ramp<>{}, "layer");
      fsdp::AdamW adamw(engine);
      fsdp::GradScaler scaler(engine);
      engine.start_trace(100);
      layer.forward();
      auto const evaluation = engine.evaluation();
      fail(*compute);
      CHECK_THROWS(engine.synchronize());
      CHECK_THROWS(layer.forward());
      CHECK_THROWS(layer.forward());  // still that exception: no scope was left open
      try {
        engine.discard_gradients();
      } catch (...) {
      }
      CHECK_THROWS(layer.forward());  // it does not revive the stream
      auto moved = std::move(layer);
      CHECK_THROWS(moved.forward());
    });
    compute.reset();
  }
}

TEST_CASE("an exception that all ranks catch in forward ends that pass, and the next begins anew") {
  std::vector<float> weights;
  std::atomic<int> missed{0};
  fsdp::local::run(2, fsdp::host::Device{}, [&](Comm comm) {
    fsdp::Mesh mesh(std::move(comm));
    Engine engine(mesh, fsdp::FullShard{});
    auto layers = engine.shard(std::vector<Ramp<>>(3), "layer");
    fsdp::Sgd sgd(engine, {.lr = 1.0f});
    for (int step = 0; step < 4; ++step) {
      try {
        forward(layers, throw_here);
        ++missed;
      } catch (std::domain_error const&) {
      }
      forward(layers, {});
      backward(layers, {});
      sgd.step();
    }
    auto const all = fsdp::testing::all_weights(engine);
    if (mesh.rank() == 0) weights = all;
  });
  CHECK(missed == 0);
  REQUIRE(weights.size() == 15);
  for (std::size_t i = 0; i < weights.size(); ++i) CHECK(weights[i] == -4.0f * static_cast<float>(i % 5 + 1));
}

TEST_CASE("an exception that leaves a use gives back the buffers of full parameters at once") {
  std::atomic<int> kept{0}, tries{0};
  fsdp::local::run(2, fsdp::host::Device{}, [&](Comm comm) {
    fsdp::Mesh mesh(std::move(comm));
    Engine engine(mesh, fsdp::FullShard{});
    auto layers = engine.shard(std::vector<Ramp<>>(3), "layer");
    engine.seal();
    auto const bytes = [&] { return engine.account().live(fsdp::MemoryTag::gather); };
    auto const before = bytes();
    auto const expect_given_back = [&](auto const& use) {
      std::int64_t inside = 0;
      try {
        use([&](Stream&) {
          inside = bytes();
          throw std::domain_error("boom");
        });
      } catch (std::domain_error const&) {
        ++tries;
      }
      if (inside <= before || bytes() != before) ++kept;
    };
    expect_given_back([&](Ramp<>::Before const& fail) { forward(layers, fail); });
    forward(layers, {});
    expect_given_back([&](Ramp<>::Before const& fail) { backward(layers, fail); });
    engine.discard_gradients();
  });
  CHECK(tries == 4);
  CHECK(kept == 0);
}

TEST_CASE("kernels of an abandoned use read their parameters to the end: the next pass's gathers wait for them") {
  std::atomic<int> wrong{0};
  fsdp::local::run(2, fsdp::host::Device{}, [&](Comm comm) {
    fsdp::Mesh mesh(std::move(comm));
    Engine engine(mesh, fsdp::FullShard{});
    auto layers = engine.shard(std::vector<Ramp<>>(3), "layer");
    auto const shards = engine.shards();
    for (std::size_t u = 0; u < shards.size(); ++u)
      shards.set_initial_values(shards[u], [u](auto const&, std::int64_t, std::span<float> out) {
        for (auto& value : out) value = static_cast<float>(u + 1);
      });
    fsdp::HeldUse held{engine};
    layers[0].forward();
    layers[1].forward();
    held.begin(fsdp::Pass::forward, layers[2].use());
    std::atomic<bool> reads{false};
    float seen = 0;
    engine.compute().enqueue([&, parameters = held.parameters()] {
      await(reads);
      seen = *parameters;
    });
    held.abandon();
    layers[0].forward();                                         // its gather takes the same buffer
    std::this_thread::sleep_for(std::chrono::milliseconds{20});  // a gather that does not wait has ended by then
    reads = true;
    engine.synchronize();
    if (seen != 3.0f) ++wrong;
  });
  CHECK(wrong == 0);
}
