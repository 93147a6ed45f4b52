// SPDX-License-Identifier: Apache-2.0
// Calls of cuda::Device run on it, leave it current, and touch no other device, whichever one the calling thread had
// used before: here threads that have used none, for which CUDA's first device is current. And ranks on two devices
// free memory when both are done with it.
// environment: FSDP_STANDIN_DEVICES=3 FSDP_STANDIN_NO_FAVOURS=1
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "fsdp/cuda.hpp"
#include "fsdp/local.hpp"
#include "fsdp/memory.hpp"
#include "tests/catch.hpp"
#include "tests/standin/runtime/runtime.hpp"

namespace {

using fsdp::cuda::Device;

constexpr int used = 2;  ///< the device that these tests work on

struct Store {
  static constexpr int threads = 32;
  template <class Block>
  void operator()(Block const& block, std::int64_t, std::int64_t* to) const {
    if (block.thread() == 0) *to = 7;
  }
};

/// Calls `action` on a thread of its own. @return what is wrong afterwards, or ""
std::string on_new_thread(std::function<void()> const& action) {
  std::string wrong;
  std::thread([&] {
    try {
      action();
    } catch (std::exception const& error) {
      wrong = error.what();
    }
    int current = -1;
    if (cudaGetDevice(&current) != cudaSuccess || current != used)
      wrong += " device " + std::to_string(current) + " is current;";
    for (int other = 0; other < 2; ++other)
      if (standin::has_context(other)) wrong += " device " + std::to_string(other) + " has a context;";
  }).join();
  return wrong;
}

/// Delays the work that is enqueued on a stream after this call.
void make_late(Device::Stream const& stream, int milliseconds) {
  auto const until = std::chrono::steady_clock::now() + std::chrono::milliseconds{milliseconds};
  static_cast<void>(
      standin::enqueue(stream.get(), "late", [until] { return std::chrono::steady_clock::now() >= until; }));
}

/// Everything that calls need, made by such calls.
struct Things {
  Device device{used};
  std::optional<Device::Stream> stream, other_stream;
  std::optional<Device::Event> begin, end;
  std::int64_t* memory = nullptr;
  std::int64_t* pinned = nullptr;
};

}  // namespace

TEST_CASE("every call of a device makes it current, and touches no other", "[standin]") {
  Things t;
  constexpr std::size_t bytes = sizeof(std::int64_t);
  auto const call = [&](char const* name, std::function<void()> const& action) {
    INFO(name);
    CHECK(on_new_thread(action) == "");
  };
  call("make_current", [&] { t.device.make_current(); });
  call("make_stream", [&] { t.stream.emplace(t.device.make_stream("one")); });
  call("make_stream", [&] { t.other_stream.emplace(t.device.make_stream("two", fsdp::StreamPriority::high)); });
  call("make_timed_event", [&] { t.begin.emplace(t.device.make_timed_event()); });
  call("make_timed_event", [&] { t.end.emplace(t.device.make_timed_event()); });
  call("allocate", [&] { t.memory = static_cast<std::int64_t*>(t.device.allocate(bytes)); });
  call("allocate_pinned", [&] { t.pinned = static_cast<std::int64_t*>(t.device.allocate_pinned(bytes)); });
  call("memory", [&] { static_cast<void>(t.device.memory()); });
  call("enable_peer_access", [&] { t.device.enable_peer_access(Device(1)); });
  call("record", [&] { t.device.record(*t.begin, *t.stream); });
  call("zero_async", [&] { t.device.zero_async(*t.stream, t.memory, bytes); });
  call("launch", [&] { t.device.launch(*t.stream, 1, Store{}, t.memory); });
  call("record", [&] { t.device.record(*t.end, *t.stream); });
  call("wait", [&] { t.device.wait(*t.other_stream, *t.end); });
  call("copy_async", [&] { t.device.copy_async(*t.other_stream, t.pinned, t.memory, bytes); });
  call("synchronize a stream", [&] { t.device.synchronize(*t.other_stream); });
  CHECK(*t.pinned == 7);
  call("synchronize an event", [&] { t.device.synchronize(*t.end); });
  call("is_done", [&] { static_cast<void>(t.device.is_done(*t.end)); });
  call("elapsed_milliseconds", [&] { static_cast<void>(t.device.elapsed_milliseconds(*t.begin, *t.end)); });
  call("synchronize_all", [&] { t.device.synchronize_all(); });
  call("deallocate", [&] { t.device.deallocate(t.memory, bytes); });
  call("deallocate_pinned", [&] { t.device.deallocate_pinned(t.pinned); });
  auto const left = standin::allocated();
  CHECK(left.device == 0);
  CHECK(left.pinned == 0);
  call("destructors", [&] {
    t.device.make_current();
    t.begin.reset();
    t.end.reset();
    t.stream.reset();
    t.other_stream.reset();
  });
  CHECK(standin::handles() == 0);
}

TEST_CASE("all work of a device is waited for, and of no other", "[standin]") {
  Device const device(used), other(1);
  auto stream = device.make_stream("late");
  auto* const pinned = static_cast<std::int64_t*>(device.allocate_pinned(sizeof(std::int64_t)));
  *pinned = 0;
  for (bool const by_event : {false, true}) {
    int attempts = 0;
    REQUIRE(standin::enqueue(stream.get(), "late work", [&attempts, pinned] {
              if (++attempts < 50) return false;
              ++*pinned;
              return true;
            }) == cudaSuccess);
    if (by_event) {
      auto event = device.make_event();
      device.record(event, stream);
      device.synchronize(event);
    } else {
      other.make_current();
      device.synchronize_all();
    }
    CHECK(*pinned == (by_event ? 2 : 1));
  }
  device.deallocate_pinned(pinned);
}

TEST_CASE("memory that a rank gives back is freed when peers have read it", "[standin]") {
  constexpr std::size_t count = 64, bytes = count * sizeof(float);
  fsdp::local::run(
      2, [](int rank) { return Device(1 + rank); },
      [&](fsdp::local::Communicator<Device>& comm) {
        auto stream = comm.device().make_stream("collectives");
        auto* const data = static_cast<float*>(comm.allocate(bytes));
        comm.device().zero_async(stream, data, bytes);
        if (comm.rank() == 1) make_late(stream, 300);
        static_cast<void>(comm.broadcast(stream, data, count, 0, fsdp::Label{"unit", "test"}));
        if (comm.rank() == 1) comm.device().synchronize(stream);
        comm.deallocate(data, bytes);
      });
  CHECK(standin::allocated().device == 0);
}

TEST_CASE("memory that ranks leave behind is freed when all their devices are done with it", "[standin]") {
  // Rank 1 fails while rank 0's device, which is late, has yet to read rank 1's memory.
  constexpr std::size_t count = 64;
  auto const body = [&](fsdp::local::Communicator<Device>& comm) {
    fsdp::MemoryAccount account;
    auto stream = comm.device().make_stream("collectives");
    if (comm.rank() == 0) make_late(stream, 300);
    fsdp::AccountedMemory const memory(comm, account, fsdp::MemoryTag::workspace, count * sizeof(float));
    auto* const data = memory.as<float>();
    comm.device().zero_async(stream, data, memory.bytes());
    static_cast<void>(comm.broadcast(stream, data, count, 1, fsdp::Label{"unit", "test"}));
    comm.exchange({}, "enqueued");
    if (comm.rank() == 1) fsdp::fail<fsdp::Error>("rank 1 fails");
    comm.exchange({}, "never");
  };
  CHECK_THROWS_WITH(fsdp::local::run(
                        2, [](int rank) { return Device(1 + rank); }, body),
                    "rank 1 fails");
  CHECK(standin::allocated().device == 0);
}
