// SPDX-License-Identifier: Apache-2.0
// Waits of the host before it reads, writes or frees memory that streams use. The stand-in does no favours here:
// neither copies of pageable memory nor cudaFree wait for anything. A wait that is missing is a race under
// ThreadSanitizer, a rule that is broken, or a wrong value: streams are late.
// needs: nlohmann_json xxHash
// environment: FSDP_STANDIN_NO_FAVOURS=1
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "fsdp/checkpoint.hpp"
#include "fsdp/cuda.hpp"
#include "fsdp/fsdp.hpp"
#include "fsdp/local.hpp"
#include "tests/catch.hpp"
#include "tests/standin/runtime/runtime.hpp"
#include "tests/support/temporary_folder.hpp"
#include "tests/support/toy_model.hpp"

namespace {

using Device = fsdp::cuda::Device;
using Comm = fsdp::local::Communicator<Device>;
using Engine = fsdp::Engine<Comm>;

/// Delays the work that is enqueued on a stream after this call by 30 ms.
void make_late(Device::Stream const& stream) {
  auto const until = std::chrono::steady_clock::now() + std::chrono::milliseconds{30};
  static_cast<void>(
      standin::enqueue(stream.get(), "late", [until] { return std::chrono::steady_clock::now() >= until; }));
}

toy::Shape shape() {
  toy::Shape small;
  small.hidden = {17, 17};
  return small;
}

/// Calls body(engine, network) on two ranks that share a device.
template <class Body>
void on_two(fsdp::ShardingStrategy const& strategy, Body const& body) {
  fsdp::local::run(2, Device{}, [&](Comm comm) {
    fsdp::Mesh<Comm> mesh(std::move(comm));
    Engine engine(mesh, strategy, {.prefetch = 1});
    toy::Network network(engine, shape());
    body(engine, network);
  });
  CHECK(standin::allocated().device == 0);
  CHECK(standin::allocated().pinned == 0);
}

std::vector<float> gradients_of(Engine& engine) {
  std::vector<float> all;
  fsdp::export_gradients(engine, [&](fsdp::TensorInfo const&, std::span<float const> values) {
    all.insert(all.end(), values.begin(), values.end());
  });
  return all;
}
void expect(bool holds, char const* what) {
  if (!holds) fsdp::fail<fsdp::Error>("{}", what);
}

}  // namespace

TEST_CASE("norms, scales and counts are read when they are there", "[standin][scalars]") {
  on_two(fsdp::FullShard{}, [](Engine& engine, auto& network) {
    fsdp::AdamW adamw(engine, {.lr = 1e-2f});
    auto& compute = engine.compute();
    make_late(compute);
    network.step(0, 1.0f);
    auto const norm = fsdp::clip_grad_norm(engine, 1.0f);
    expect(norm.value() > 0.0, "the norm");
    make_late(compute);
    adamw.step(1e-2f, norm);
    expect(adamw.steps() == 1, "steps");
    make_late(compute);
    adamw.set_steps(7);
    make_late(compute);
    expect(adamw.steps() == 7, "steps that were set");
  });
  on_two(fsdp::FullShard{}, [](Engine& engine, auto& network) {
    fsdp::AdamW adamw(engine, {.lr = 1e-2f});
    auto& compute = engine.compute();
    make_late(compute);
    fsdp::GradScaler scaler(engine, {.init_scale = 8.0f});
    expect(scaler.value() == 8.0f, "the scale");
    network.forward(0);
    network.backward(1.0f, scaler.scale());
    scaler.step(adamw, 1e-2f);
    make_late(compute);
    expect(scaler.skipped() == 0, "skipped steps");
    make_late(compute);
    expect(scaler.state().good_steps == 1, "good steps");
    make_late(compute);
    scaler.load_state({.scale = 4.0f, .good_steps = 3});
    make_late(compute);
    network.step(1, 1.0f, scaler.scale());  // reads the scale that the destructor frees
  });
}

TEST_CASE("parameters and gradients are exported when they are complete, and imported when nothing reads them",
          "[standin][export]") {
  for (bool const sharded : {true, false}) {
    fsdp::ShardingStrategy const strategy = sharded ? fsdp::ShardingStrategy{fsdp::FullShard{}} : fsdp::NoShard{};
    on_two(strategy, [](Engine& engine, auto& network) {
      fsdp::Sgd sgd(engine, {.lr = 1e-1f});
      make_late(engine.compute());
      network.step(0, 1.0f);
      auto const gradients = gradients_of(engine);
      make_late(engine.compute());
      sgd.step(1e-1f);
      auto const parameters = toy::parameters(engine);
      expect(engine.rank() != 0 || (!gradients.empty() && !parameters.empty()), "exports");
      network.forward(1);
      fsdp::import_shard(engine, [](fsdp::TensorInfo const&, std::int64_t first, std::span<float> out) {
        for (std::size_t i = 0; i < out.size(); ++i)
          out[i] = static_cast<float>((first + static_cast<std::int64_t>(i)) % 5);
      });
      auto const imported = toy::parameters(engine);
      for (std::size_t i = 0; i < std::min<std::size_t>(imported.size(), 5); ++i)
        expect(imported[i] == static_cast<float>(i), "what was imported");
    });
  }
}

TEST_CASE("a trace is read when all streams have written their times", "[standin][trace]") {
  for (bool const sharded : {true, false}) {
    fsdp::ShardingStrategy const strategy = sharded ? fsdp::ShardingStrategy{fsdp::FullShard{}} : fsdp::NoShard{};
    on_two(strategy, [](Engine& engine, auto& network) {
      network.step(0, 1.0f);
      engine.start_trace(1000);
      make_late(engine.compute());
      network.step(1, 1.0f);
      for (auto const& span : engine.collect_trace()) expect(span.begin_ns <= span.end_ns, "a span's times");
      network.step(2, 1.0f);
      engine.start_trace(1000);  // takes the place of the first, whose memory is freed
      expect(engine.stop_trace().empty(), "spans of before");
    });
  }
}

TEST_CASE("to synchronise an engine is to wait for its streams", "[standin][synchronize]") {
  on_two(fsdp::FullShard{}, [](Engine& engine, auto& network) {
    network.forward(0);
    auto* const pinned = static_cast<int*>(engine.device().allocate_pinned(2 * sizeof(int)));
    for (int which : {0, 1}) {
      auto& stream = which == 0 ? engine.compute() : engine.shards().gather_stream();
      make_late(stream);
      pinned[which] = 0;
      static_cast<void>(standin::enqueue(stream.get(), "a write", [pinned, which] {
        pinned[which] = 1;
        return true;
      }));
    }
    engine.synchronize();
    expect(pinned[0] == 1 && pinned[1] == 1, "what streams have written");
    engine.device().deallocate_pinned(pinned);
  });
}

TEST_CASE("gradients that wait in bf16 are added up when they are there", "[standin][held]") {
  fsdp::local::run(2, Device{}, [&](Comm comm) {
    fsdp::Mesh<Comm> mesh(std::move(comm));
    fsdp::Engine engine(mesh, fsdp::FullShard{}, fsdp::Bf16Reduce{}, {.allow_no_sync = true});
    toy::Network network(engine, shape());
    fsdp::Sgd sgd(engine, {.lr = 1e-2f});
    for (std::int64_t step = 0; step < 2; ++step) {
      for (int micro = 0; micro < 3; ++micro) {
        auto const waits = engine.no_sync(micro < 2);
        network.step(3 * step + micro, 1.0f);
      }
      sgd.step(1e-2f);
    }
  });
}

TEST_CASE("a step after a forward pass that was left half-way waits for what was gathered ahead", "[standin][left]") {
  fsdp::local::run(2, Device{}, [&](Comm comm) {
    constexpr std::int64_t width = 16;
    fsdp::Mesh<Comm> mesh(std::move(comm));
    Device const device;
    fsdp::MemoryAccount account;
    fsdp::AccountedMemory const memory(device, account, fsdp::MemoryTag::activations, 4 * width * sizeof(float));
    auto* const x = memory.as<float>();
    auto *const h = x + width, *const y = h + width, *const dy = y + width;
    Engine engine(mesh, fsdp::FullShard{}, {.prefetch = 1});
    auto first = engine.shard(toy::Embed<Device>{device, 1, width, width}, "first");
    auto second = engine.shard(toy::Embed<Device>{device, 1, width, width}, "second");
    fsdp::Sgd sgd(engine, {.lr = 1e-2f});
    device.zero_async(engine.compute(), x, memory.bytes());
    first.forward(toy::constant(x), h);
    second.forward(toy::constant(h), y);
    second.backward(toy::constant(h), toy::constant(dy));
    first.backward(toy::constant(x), toy::constant(dy));
    first.forward(toy::constant(x), h);
    sgd.step(1e-2f);
  });
}

TEST_CASE("the host stays within passes_ahead passes of compute", "[standin][ahead]") {
  on_two(fsdp::FullShard{}, [](Engine& engine, auto& network) {
    network.forward(0);
    engine.synchronize();
    auto* const passed = static_cast<int*>(engine.device().allocate_pinned(sizeof(int)));
    *passed = 0;
    make_late(engine.compute());
    static_cast<void>(standin::enqueue(engine.compute().get(), "a write", [passed] {
      *passed = 1;
      return true;
    }));
    for (int pass = 0; pass <= engine.options().passes_ahead; ++pass) network.forward(pass);
    expect(*passed == 1, "the host is further ahead");
    engine.synchronize();
    engine.device().deallocate_pinned(passed);
  });
}

TEST_CASE("a checkpoint holds what streams have written, and is loaded before they read it", "[standin][checkpoint]") {
  fsdp::testing::TemporaryFolder const folder;
  on_two(fsdp::FullShard{}, [&](Engine& engine, auto& network) {
    fsdp::AdamW adamw(engine, {.lr = 1e-2f});
    fsdp::BackgroundSaver saver(engine);
    auto const step = [&](std::int64_t at) {
      network.step(at, 1.0f);
      make_late(engine.compute());
      adamw.step(1e-2f);
    };
    step(0);
    fsdp::save(engine, adamw, folder.path / "now");
    auto const saved = toy::parameters(engine);
    saver.save(adamw, folder.path / "later");
    step(1);
    saver.wait();
    for (char const* name : {"now", "later"}) {
      step(2);
      make_late(engine.compute());
      fsdp::load_latest(engine, adamw, folder.path / name);
      expect(toy::parameters(engine) == saved, "what was loaded");
      expect(adamw.steps() == 1, "steps that were loaded");
    }
  });
}

TEST_CASE("an engine ends when its streams have", "[standin][end]") {
  for (bool const sharded : {true, false}) {
    fsdp::local::run(2, Device{}, [&](Comm comm) {
      fsdp::Mesh<Comm> mesh(std::move(comm));
      Engine engine(mesh, sharded ? fsdp::ShardingStrategy{fsdp::FullShard{}} : fsdp::NoShard{}, {.prefetch = 1});
      {
        toy::Network network(engine, shape());
        network.step(0, 1.0f);
        if (sharded) make_late(engine.shards().gather_stream());
        network.step(1, 1.0f);
      }
      make_late(engine.compute());
      static_cast<void>(fsdp::clip_grad_norm(engine, 1.0f));
    });
    CHECK(standin::allocated().device == 0);
  }
}
