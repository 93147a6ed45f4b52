// SPDX-License-Identifier: Apache-2.0
// Misuse is an exception that names rank, unit, what was expected and what came; never a hang, never a wrong result.
//
// skip-tsan
#include <functional>
#include <optional>
#include <string>

#include "tests/catch.hpp"
#include "tests/support/local_run.hpp"

namespace {

using Comm = fsdp::local::Communicator<fsdp::host::Device>;
using Engine = fsdp::Engine<Comm>;
using Layer = toy::Layer<fsdp::host::Device>;
using Sharded = fsdp::ShardedModule<Layer, Engine>;

Layer layer() { return {fsdp::host::Device{}, 2, 3, 5}; }

/// The message of what `body` throws on ranks that run two layers; "" if nothing.
std::string message_of(int ranks, std::function<void(int rank, Engine&, std::vector<Sharded>&)> const& body) {
  try {
    fsdp::local::run(ranks, fsdp::host::Device{}, [&](Comm comm) {
      fsdp::Mesh<Comm> mesh(std::move(comm));
      Engine engine(mesh, fsdp::FullShard{});
      auto layers = engine.shard(std::vector<Layer>{layer(), layer()}, "layers");
      body(mesh.rank(), engine, layers);
      engine.synchronize();
    });
  } catch (fsdp::Error const& error) {
    return error.what();
  }
  return {};
}

struct Buffers {
  float x[6]{}, y[6]{}, pre[10]{}, act[10]{}, d1[10]{}, d2[10]{};
  Layer::Saved saved() { return {pre, act}; }
};

void forward(Sharded& sharded, Buffers& b) { sharded.forward(b.x, b.y, b.saved()); }
void backward(Sharded& sharded, Buffers& b) { sharded.backward(b.x, b.y, b.saved(), b.d1, b.d2); }

bool contains(std::string const& text, std::string const& part) {
  INFO(text);
  INFO("lacks: " << part);
  return text.find(part) != std::string::npos;
}

struct Twice {
  template <class T>
  struct Params {
    fsdp::Tensor<T, 1> a, b;
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor("weight", p.a, {3});
    tensor("weight", p.b, {3});
  }
};

}  // namespace

TEST_CASE("a module names each of its tensors once") {
  CHECK(contains(message_of(1, [](int, Engine& engine, std::vector<Sharded>&) { engine.shard(Twice{}, "twice"); }),
                 "a module names its tensor 'twice.weight' twice"));
}

TEST_CASE("a forward out of the declared order names both modules") {
  auto const message = message_of(2, [](int, Engine&, std::vector<Sharded>& layers) {
    Buffers b;
    forward(layers[1], b);
  });
  CHECK(contains(message, "expected forward of 'layers.0', got forward of 'layers.1'"));
}

TEST_CASE("a backward before its forward, or out of order, names both modules") {
  CHECK(contains(message_of(1,
                            [](int, Engine& engine, std::vector<Sharded>& layers) {
                              Buffers b;
                              forward(layers[0], b);
                              engine.synchronize();
                              backward(layers[0], b);
                            }),
                 "before the forward pass was complete; expected forward of 'layers.1' next"));
  CHECK(contains(message_of(1,
                            [](int, Engine& engine, std::vector<Sharded>& layers) {
                              Buffers b;
                              forward(layers[0], b);
                              forward(layers[1], b);
                              engine.synchronize();
                              backward(layers[0], b);
                            }),
                 "expected backward of 'layers.1', got backward of 'layers.0'"));
}

TEST_CASE("ranks that run different orders get an error that names both units, not a hang") {
  // The declared order itself is checked against: the rank that strays throws, and its peers are told.
  auto const message = message_of(2, [](int rank, Engine&, std::vector<Sharded>& layers) {
    Buffers b;
    forward(layers[rank == 0 ? 0 : 1], b);
    forward(layers[1], b);
  });
  CHECK(contains(message, "rank 1"));
  CHECK(contains(message, "layers.0"));
  CHECK(contains(message, "layers.1"));
}

TEST_CASE("ranks that declare different models get an error on every rank, naming the first difference") {
  std::string message;
  try {
    fsdp::local::run(3, fsdp::host::Device{}, [&](Comm comm) {
      fsdp::Mesh<Comm> mesh(std::move(comm));
      Engine engine(mesh, fsdp::FullShard{});
      auto sharded = engine.shard(Layer{fsdp::host::Device{}, 2, 3, mesh.rank() == 2 ? 7 : 5}, "layer");
      engine.seal();
    });
  } catch (fsdp::ConfigError const& error) {
    message = error.what();
  }
  CHECK(contains(message, "ranks disagree"));
  CHECK(contains(message, "tensor 'layer.up' (3, 5)"));
  CHECK(contains(message, "tensor 'layer.up' (3, 7)"));
}

TEST_CASE("stepping without gradients, or clipping them, is an error") {
  CHECK(contains(message_of(1, [](int, Engine& engine, std::vector<Sharded>&) { fsdp::AdamW(engine).step(); }),
                 "unit 'layers.0' has no reduced gradients"));
  CHECK(contains(message_of(1,
                            [](int, Engine& engine, std::vector<Sharded>&) {
                              engine.shards().attach_optimizer();
                              static_cast<void>(fsdp::clip_grad_norm(engine, 1.0f));
                            }),
                 "unit 'layers.0' has no reduced gradients"));
}

TEST_CASE("settings out of range are errors") {
  auto const config = [](fsdp::EngineOptions options) {
    return message_of(1, [&](int, Engine& engine, std::vector<Sharded>&) {
      Comm& world = engine.world();
      fsdp::Mesh<Comm> mesh(world.split(0, 0, "other"));
      Engine other(mesh, fsdp::FullShard{}, options);
    });
  };
  CHECK(contains(config({.prefetch = -1}), "prefetch must not be negative, got -1"));
  CHECK(contains(config({.bucket_bytes = 0}), "bucket sizes must be positive"));
  for (auto const type : {fsdp::DType::f64, fsdp::DType::i64})
    CHECK(contains(
        config({.reduce_dtype = type}),
        "reduce_dtype: backward writes fp32: expected fp32, bf16 or fp16, got " + std::string(fsdp::name(type))));
  CHECK(contains(config({.reduce_dtype = static_cast<fsdp::DType>(42)}),
                 "expected fp32, bf16 or fp16, got a DType of value 42"));
  for (auto const type : {fsdp::DType::f32, fsdp::DType::bf16, fsdp::DType::f16})
    CHECK(config({.reduce_dtype = type}).empty());
  CHECK(contains(
      message_of(1, [](int, Engine& engine, std::vector<Sharded>&) { fsdp::AdamW adamw(engine, {.beta1 = 1.0f}); }),
      "betas must be in [0, 1)"));
  CHECK(contains(message_of(1, [](int, Engine& engine,
                                  std::vector<Sharded>&) { static_cast<void>(fsdp::clip_grad_norm(engine, 0.0f)); }),
                 "expected a positive max_norm, got 0"));
  CHECK(message_of(1, [](int, Engine& engine, std::vector<Sharded>&) { static_cast<void>(engine.no_sync()); }).empty());
  CHECK(contains(message_of(2, [](int, Engine& engine, std::vector<Sharded>&) { static_cast<void>(engine.no_sync()); }),
                 "no_sync"));
}

TEST_CASE("a shard group must divide the world, and HybridShard must have one") {
  auto const hybrid = [](int group) {
    std::string message;
    try {
      fsdp::local::run(4, fsdp::host::Device{}, [&](Comm comm) {
        fsdp::Mesh<Comm> mesh(std::move(comm));
        fsdp::Engine engine(mesh, fsdp::HybridShard<>{.group = group});
      });
    } catch (fsdp::ConfigError const& error) {
      message = error.what();
    }
    return message;
  };
  CHECK(contains(hybrid(3), "a shard group of 3 ranks does not divide the world of 4"));
  CHECK(contains(hybrid(0), "hybrid_shard(full_shard): set HybridShard::group"));
  CHECK(hybrid(2).empty());
}

TEST_CASE("modules after sealing, and names twice, are errors") {
  CHECK(contains(message_of(1,
                            [](int, Engine& engine, std::vector<Sharded>&) {
                              engine.seal();
                              (void)engine.shard(layer(), "late");
                            }),
                 "'late' was added too late"));
  CHECK(contains(
      message_of(1, [](int, Engine& engine, std::vector<Sharded>&) { (void)engine.shard(layer(), "layers.1"); }),
      "the engine already has a unit 'layers.1'"));
  CHECK(contains(
      message_of(1, [](int, Engine& engine, std::vector<Sharded>&) { engine.add_unit("empty"), engine.seal(); }),
      "no module uses unit 'empty'"));
}

TEST_CASE("an exception from a module's forward leaves the engine usable") {
  auto const message = message_of(2, [](int, Engine& engine, std::vector<Sharded>& layers) {
    Buffers b;
    engine.seal();
    try {
      auto const scope = engine.forward_scope(fsdp::UseId{0});
      throw std::runtime_error("user code");
    } catch (std::runtime_error const&) {
    }
    forward(layers[0], b);
    forward(layers[1], b);
    engine.synchronize();
  });
  CHECK(message.empty());
}

TEST_CASE("a backward inside an evaluation is an error") {
  CHECK(contains(message_of(1,
                            [](int, Engine& engine, std::vector<Sharded>& layers) {
                              Buffers b;
                              auto const scope = engine.evaluation();
                              forward(layers[0], b);
                              forward(layers[1], b);
                              engine.synchronize();
                              backward(layers[1], b);
                            }),
                 "inside an evaluation"));
}
