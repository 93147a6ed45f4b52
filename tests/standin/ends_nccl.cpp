// SPDX-License-Identifier: Apache-2.0
// nccl::Communicator and engines over it, on stand-ins: they touch their own device alone, whichever one a thread had
// used before; what is in flight when they end is waited for, or aborted; and nothing is left. Ranks are threads.
// environment: FSDP_STANDIN_DEVICES=3
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fsdp/bootstrap.hpp"
#include "fsdp/cuda.hpp"
#include "fsdp/fsdp.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"
#include "fsdp/nccl.hpp"
#include "tests/catch.hpp"
#include "tests/standin/nccl/handles.hpp"
#include "tests/standin/nccl/ranks.hpp"
#include "tests/standin/runtime/runtime.hpp"
#include "tests/support/toy_model.hpp"

namespace {

using Comm = fsdp::nccl::Communicator;
using Control = fsdp::local::Communicator<fsdp::host::Device>;
using fsdp::cuda::Device;

constexpr std::size_t count = 64;
constexpr fsdp::Label label{"unit", "test"};

/// Delays the work that is enqueued on a stream after this call.
void make_late(Device::Stream const& stream, int milliseconds = 300) {
  auto const until = std::chrono::steady_clock::now() + std::chrono::milliseconds{milliseconds};
  static_cast<void>(
      standin::enqueue(stream.get(), "late", [until] { return std::chrono::steady_clock::now() >= until; }));
}

/// Calls body(control, device) on two ranks, on devices 1 and 2.
void on_two(std::function<void(Control&, Device const&)> const& body) {
  fsdp::local::run(2, fsdp::host::Device{}, [&](Control& control) { body(control, Device(1 + control.rank())); });
}
Comm make(Control& control, Device const& device, bool symmetric = false) {
  fsdp::nccl::Options options;
  options.timeout = std::chrono::seconds(20);
  options.symmetric_memory = symmetric;
  return Comm::from(control, device, options);
}
int communicators() {
  int alive = 0;
  standin::nccl::for_each_communicator([&](auto&) { ++alive; });
  return alive;
}
void expect_nothing_left() {
  CHECK(standin::allocated().device == 0);
  CHECK(standin::handles() == 0);
  CHECK(communicators() == 0);
}

/// Calls `action` on a thread that has chosen no device: the first one is current.
void on_new_thread(std::function<void()> const& action) {
  std::exception_ptr error;
  std::thread([&] {
    try {
      action();
    } catch (...) {
      error = std::current_exception();
    }
  }).join();
  if (error) std::rethrow_exception(error);
}

}  // namespace

// The first test: it forks, and no call of CUDA's may come before.
TEST_CASE("a communicator is split when its collectives are done, and texts are read when they are there",
          "[standin][split]") {
  int const port = fsdp::bootstrap::listen_on("127.0.0.1", 0).local_port();
  auto const ended = standin::test::in_processes(2, [&](int rank) {
    for (auto const& [name, value] :
         {std::pair{"RANK", rank}, {"WORLD_SIZE", 2}, {"LOCAL_RANK", rank}, {"MASTER_PORT", port}})
      ::setenv(name, std::to_string(value).c_str(), 1);
    ::setenv("MASTER_ADDR", "127.0.0.1", 1);
    ::setenv("FSDP_STANDIN_NO_FAVOURS", "1", 1);
    Device const device(1 + rank);
    fsdp::nccl::Options options;
    options.timeout = std::chrono::seconds(20);
    options.symmetric_memory = true;
    auto comm = Comm::from_environment(device, options);  // texts go over TCP, and wait for no collective
    auto stream = device.make_stream("collectives");
    auto* const data = static_cast<float*>(comm.allocate(2 * count * sizeof(float)));
    on_new_thread([&] { comm.register_memory(data, 2 * count * sizeof(float)); });
    standin::test::expect(!standin::has_context(0), "the first device has a context");
    device.zero_async(stream, data, 2 * count * sizeof(float));
    if (rank == 1) make_late(stream);
    auto const own = static_cast<std::size_t>(rank) * count;
    static_cast<void>(comm.all_gather(stream, static_cast<float const*>(data + own), data, count, label));
    static_cast<void>(comm.split(0, rank, "part"));
    device.synchronize(stream);
    comm.deallocate(data, 2 * count * sizeof(float));
    auto over_nccl = Comm::from(comm, device, options);  // texts go through device memory
    auto const texts = over_nccl.exchange("rank " + std::to_string(rank), "texts");
    standin::test::expect(texts == std::vector<std::string>{"rank 0", "rank 1"}, "texts");
  });
  for (auto const& process : ended) {
    INFO(process.text);
    CHECK(process.code == 0);
  }
}

TEST_CASE("no call touches another device than the communicator's", "[standin][devices]") {
  auto const untouched = [](char const* after) {
    if (standin::has_context(0)) fsdp::fail<fsdp::Error>("the first device has a context after {}", after);
  };
  for (bool const symmetric : {false, true}) {
    on_two([&](Control& control, Device const& device) {
      std::optional<Comm> comm, part;
      std::optional<Device::Stream> stream;
      float* data = nullptr;
      constexpr std::size_t bytes = 2 * count * sizeof(float);
      auto const call = [&](char const* name, std::function<void()> const& action) {
        on_new_thread(action);
        untouched(name);
      };
      call("from", [&] { comm.emplace(make(control, device, symmetric)); });
      call("make_stream", [&] { stream.emplace(device.make_stream("collectives")); });
      call("exchange", [&] { static_cast<void>(comm->exchange("text", "texts")); });
      call("allocate", [&] { data = static_cast<float*>(comm->allocate(bytes)); });
      call("register_memory", [&] { comm->register_memory(data, bytes); });
      call("zero_async", [&] { device.zero_async(*stream, data, bytes); });
      auto const gather = [&] {
        auto const own = static_cast<std::size_t>(comm->rank()) * count;
        static_cast<void>(comm->all_gather(*stream, static_cast<float const*>(data + own), data, count, label));
      };
      if (comm->rank() == 1) make_late(*stream);  // the watch looks in the meantime
      call("all_gather", gather);
      device.synchronize(*stream);
      untouched("the watch");
      if (comm->rank() == 1) make_late(*stream);
      gather();  // in flight, on the rank that is not late too
      call("pending", [&] { static_cast<void>(comm->pending()); });
      call("split", [&] { part.emplace(comm->split(0, comm->rank(), "part")); });
      call("register_memory", [&] { part->register_memory(data, bytes); });
      call("exchange", [&] { static_cast<void>(part->exchange("text", "texts")); });
      call("the end of a part", [&] { part.reset(); });
      call("deallocate", [&] { comm->deallocate(data, bytes); });
      data = nullptr;
      if (symmetric) {
        data = static_cast<float*>(comm->allocate(bytes));
        comm->register_memory(data, bytes);  // a window that is left to the communicator's end
      }
      call("the end", [&] { comm.reset(); });
#if NCCL_VERSION_CODE >= 22700
      if (symmetric) static_cast<void>(ncclMemFree(data));
#endif
      on_new_thread([&] {
        device.make_current();
        stream.reset();
      });
    });
  }
  expect_nothing_left();
}

TEST_CASE("the watch asks nothing of a communicator that has ended", "[standin][watch]") {
  on_two([](Control& control, Device const& device) {
    auto late = device.make_stream("late");
    auto comm = make(control, device);
    static_cast<void>(comm.exchange("text", "texts"));
    make_late(late, 500);  // the communicator frees its memory after NCCL's part: that waits for the device
  });
  expect_nothing_left();
}

TEST_CASE("while an exception passes a communicator is aborted", "[standin][abort]") {
  for (int const thrower : {0, 1}) {
    on_two([&](Control& control, Device const& device) {
      bool caught = false;
      auto stream = device.make_stream("collectives");
      auto* const data = static_cast<float*>(device.allocate(2 * count * sizeof(float)));
      try {
        auto comm = make(control, device);
        if (comm.rank() == thrower)
          static_cast<void>(comm.all_reduce(stream, static_cast<float const*>(data), data, count, label));
        fsdp::fail<fsdp::Error>("lost");
      } catch (fsdp::Error const&) {
        caught = true;
      }
      device.synchronize(stream);
      device.deallocate(data, 0);
      if (!caught) fsdp::fail<fsdp::Error>("nothing was thrown");
    });
  }
  expect_nothing_left();
}

TEST_CASE("an engine ends when its collectives are done", "[standin][engine]") {
  enum class Last { gather, reduce, replicate, norm };
  auto const last = GENERATE(Last::gather, Last::reduce, Last::replicate, Last::norm);
  on_two([&](Control& control, Device const& device) {
    auto const own = static_cast<std::size_t>(control.rank()) * count;
    fsdp::Mesh<Comm> mesh(make(control, device));
    auto* const data = static_cast<float*>(device.allocate(3 * count * sizeof(float)));  // outlives the engine
    {
      fsdp::Engine<Comm> engine(
          mesh, last == Last::replicate ? fsdp::ShardingStrategy{fsdp::NoShard{}} : fsdp::FullShard{}, {});
      auto& compute = engine.compute();
      auto const is_late = engine.rank() == 1;
      auto module = engine.shard(toy::Embed<Device>{device, 1, 16, 16}, "unit");
      device.zero_async(compute, data, 3 * count * sizeof(float));
      module.forward(static_cast<float const*>(data), data + count);
      if (is_late && (last == Last::reduce || last == Last::replicate)) make_late(compute);
      module.backward(static_cast<float const*>(data), static_cast<float const*>(data + 2 * count));
      if (last == Last::gather || last == Last::norm) {
        engine.synchronize();
        auto& stream = last == Last::gather ? engine.shards().gather_stream() : compute;
        if (is_late) make_late(stream);
      }
      if (last == Last::gather)
        static_cast<void>(engine.shards().gather_communicator().all_gather(
            engine.shards().gather_stream(), static_cast<float const*>(data + own), data, count, label));
      if (last == Last::norm) static_cast<void>(fsdp::clip_grad_norm(engine, 1.0f));
    }
    device.deallocate(data, 0);
  });
  expect_nothing_left();
}
