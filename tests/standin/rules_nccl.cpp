// SPDX-License-Identifier: Apache-2.0
// Every rule of the stand-in for NCCL is broken once, and reported. Ranks are threads.
// environment: FSDP_STANDIN_DEVICES=3
#include "tests/standin/nccl/rules.hpp"

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "tests/catch.hpp"
#include "tests/standin/nccl/ranks.hpp"

namespace {

using standin::test::check;
using standin::test::expect;
using standin::test::Memory;
using standin::test::new_identifier;
using standin::test::on_threads;
using standin::test::Rank;
using standin::test::Reports;
using standin::test::wait_until;

/// Calls body(rank) on two ranks.
void on_two(std::function<void(Rank&)> const& body) {
  auto const id = new_identifier();
  auto const error = on_threads(2, [&](int place) {
    Rank rank(id, place, 2, place);
    body(rank);
  });
  expect(error.empty(), error);
}
void on_one(std::function<void(Rank&)> const& body) {
  auto const id = new_identifier();
  auto const error = on_threads(1, [&](int) {
    Rank rank(id, 0, 1, 0);
    body(rank);
  });
  expect(error.empty(), error);
}

ncclResult_t sum(Rank const& r, float* data, std::size_t count) {
  return ncclAllReduce(data, data, count, ncclFloat32, ncclSum, r.comm, r.stream);
}

/// Ranks enqueue what differs; each waits until both were told of it, and gives up.
void mismatch(std::function<void(Rank&, float*)> const& enqueue) {
  std::size_t const before = Reports::size();
  on_two([&](Rank& r) {
    Memory<float> data(64);
    enqueue(r, data.data());
    wait_until([&] { return Reports::size() >= before + 2; }, "both ranks have reported");
    r.abort();
    r.synchronize();
  });
}

/// Keeps a stream busy.
class Gate {
 public:
  explicit Gate(cudaStream_t stream) {
    check(standin::enqueue(stream, "a gate", [this] { return open_.load(); }), "gate");
  }
  void open() { open_ = true; }

 private:
  std::atomic<bool> open_{false};
};

/// A window of a rank, and its memory.
struct Window {
  Window(Rank const& r, std::size_t bytes) : owner(r) {
    check(ncclMemAlloc(&memory, bytes), "ncclMemAlloc");
    check(ncclCommWindowRegister(r.comm, memory, bytes, &handle, NCCL_WIN_COLL_SYMMETRIC), "ncclCommWindowRegister");
  }
  Window(Window const&) = delete;
  Window& operator=(Window const&) = delete;
  ~Window() {
    static_cast<void>(ncclCommWindowDeregister(owner.comm, handle));
    static_cast<void>(ncclMemFree(memory));
  }
  Rank const& owner;
  void* memory = nullptr;
  ncclWindow_t handle = nullptr;
};

void break_window_memory() {
  on_one([](Rank& r) {
    Memory<float> plain(1024);
    ncclWindow_t window = nullptr;
    expect(ncclCommWindowRegister(r.comm, plain.data(), 4096, &window, 0) == ncclInvalidUsage, "cudaMalloc's memory");
  });
}
void break_window_alignment() {
  on_one([](Rank& r) {
    void* memory = nullptr;
    check(ncclMemAlloc(&memory, 8192), "ncclMemAlloc");
    ncclWindow_t window = nullptr;
    auto* const inside = static_cast<std::byte*>(memory) + 256;
    expect(ncclCommWindowRegister(r.comm, inside, 4096, &window, 0) == ncclInvalidUsage, "memory that is not aligned");
    check(ncclMemFree(memory), "ncclMemFree");
  });
}
void break_window_size() {
  on_two([](Rank& r) {
    std::size_t const bytes = r.rank == 0 ? 4096 : 8192;
    void* memory = nullptr;
    check(ncclMemAlloc(&memory, bytes), "ncclMemAlloc");
    ncclWindow_t window = nullptr;
    expect(ncclCommWindowRegister(r.comm, memory, bytes, &window, NCCL_WIN_COLL_SYMMETRIC) == ncclInvalidUsage,
           "sizes");
    check(ncclMemFree(memory), "ncclMemFree");
  });
}
void break_window_twice() {
  on_one([](Rank& r) {
    Window const window(r, 4096);
    ncclWindow_t again = nullptr;
    check(ncclCommWindowRegister(r.comm, window.memory, 4096, &again, NCCL_WIN_COLL_SYMMETRIC), "register");
    check(ncclCommWindowDeregister(r.comm, again), "ncclCommWindowDeregister");
  });
}
void break_window_communicator() {
  on_one([](Rank& r) {
    Window const window(r, 4096);
    ncclComm_t other = nullptr;
    check(ncclCommSplit(r.comm, 0, 0, &other, nullptr), "ncclCommSplit");
    expect(ncclCommWindowDeregister(other, window.handle) == ncclInvalidArgument, "another communicator's window");
    check(ncclCommDestroy(other), "ncclCommDestroy");
  });
}
void break_window_in_use() {
  on_one([](Rank& r) {
    void* memory = nullptr;
    check(ncclMemAlloc(&memory, 4096), "ncclMemAlloc");
    ncclWindow_t window = nullptr;
    check(ncclCommWindowRegister(r.comm, memory, 4096, &window, NCCL_WIN_COLL_SYMMETRIC), "register");
    Gate gate(r.stream);
    check(sum(r, static_cast<float*>(memory), 16), "sum");
    check(ncclCommWindowDeregister(r.comm, window), "ncclCommWindowDeregister");
    gate.open();
    r.synchronize();
    check(ncclMemFree(memory), "ncclMemFree");
  });
}
void break_window_left() {
  on_one([](Rank& r) {
    void* memory = nullptr;
    check(ncclMemAlloc(&memory, 4096), "ncclMemAlloc");
    ncclWindow_t window = nullptr;
    check(ncclCommWindowRegister(r.comm, memory, 4096, &window, NCCL_WIN_COLL_SYMMETRIC), "register");
    check(ncclCommDestroy(std::exchange(r.comm, nullptr)), "ncclCommDestroy");
    check(ncclMemFree(memory), "ncclMemFree");
  });
}
void break_window_freed() {
  on_one([](Rank& r) {
    void* memory = nullptr;
    check(ncclMemAlloc(&memory, 4096), "ncclMemAlloc");
    ncclWindow_t window = nullptr;
    check(ncclCommWindowRegister(r.comm, memory, 4096, &window, NCCL_WIN_COLL_SYMMETRIC), "register");
    check(ncclMemFree(memory), "ncclMemFree");
    check(ncclCommWindowDeregister(r.comm, window), "ncclCommWindowDeregister");
  });
}
void break_window_offset() {
  std::size_t const before = Reports::size();
  on_two([&](Rank& r) {
    void* memory = nullptr;
    check(ncclMemAlloc(&memory, 4096), "ncclMemAlloc");
    ncclWindow_t window = nullptr;
    check(ncclCommWindowRegister(r.comm, memory, 4096, &window, NCCL_WIN_COLL_SYMMETRIC), "register");
    check(sum(r, static_cast<float*>(memory) + 4 * r.rank, 4), "sum");
    wait_until([&] { return Reports::size() >= before + 2; }, "both ranks have reported");
    r.abort();
    r.synchronize();
    check(ncclMemFree(memory), "ncclMemFree");
  });
}

void break_overlapping_buffers() {
  on_one([](Rank& r) {
    Memory<float> data(64);
    check(ncclAllGather(data.data() + 1, data.data(), 4, ncclFloat32, r.comm, r.stream), "ncclAllGather");
    r.synchronize();
  });
}
void break_collective_stream() {
  on_one([](Rank& r) {
    cudaStream_t other = nullptr;
    check(cudaSetDevice(1), "cudaSetDevice");
    check(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), "stream");
    check(cudaSetDevice(0), "cudaSetDevice");
    Memory<float> data(4);
    expect(ncclAllReduce(data.data(), data.data(), 4, ncclFloat32, ncclSum, r.comm, other) == ncclInvalidArgument,
           "a stream of another device");
    check(cudaStreamDestroy(other), "cudaStreamDestroy");
  });
}
void break_dead_communicator() {
  on_one([](Rank& r) {
    auto const dead = r.comm;
    r.abort();
    int rank = 0;
    expect(ncclCommUserRank(dead, &rank) == ncclInvalidArgument, "a communicator that was aborted");
  });
}
void break_call_in_progress() {
  auto const id = new_identifier();
  Rank r(id, 0, 2, 0, 0);  // its peer never comes
  int size = 0;
  expect(ncclCommCount(r.comm, &size) == ncclInvalidArgument, "a communicator in progress");
  r.abort();
}
void break_concurrent_calls() {
  auto const id = new_identifier();
  std::atomic<bool> reported{false};
  auto const error = on_threads(2, [&](int place) {
    Rank r(id, place, 2, place);
    ncclComm_t part = nullptr;
    if (place == 0) {
      std::thread split([&, comm = r.comm] { static_cast<void>(ncclCommSplit(comm, 0, 0, &part, nullptr)); });
      Memory<float> data(1);
      wait_until([&] { return sum(r, data.data(), 0) != ncclSuccess; }, "the split is under way");
      reported = true;
      r.abort();
      split.join();
    } else {
      wait_until([&] { return reported.load(); }, "it is reported");
      r.abort();
    }
  });
  expect(error.empty(), error);
}
void break_destroy_in_flight() {
  on_one([](Rank& r) {
    Memory<float> data(4);
    Gate gate(r.stream);
    check(sum(r, data.data(), 4), "sum");
    std::thread opener([&] {
      wait_until([] { return !Reports::of("destroy_in_flight").empty(); }, "it is reported");
      gate.open();
    });
    check(ncclCommDestroy(std::exchange(r.comm, nullptr)), "ncclCommDestroy");
    opener.join();
    r.synchronize();
  });
}
void break_split_in_flight() {
  on_one([](Rank& r) {
    Memory<float> data(4);
    Gate gate(r.stream);
    check(sum(r, data.data(), 4), "sum");
    ncclComm_t part = nullptr;
    check(ncclCommSplit(r.comm, 0, 0, &part, nullptr), "ncclCommSplit");
    gate.open();
    r.synchronize();
    check(ncclCommDestroy(part), "ncclCommDestroy");
  });
}
void break_identifier_reuse() {
  auto const id = new_identifier();
  Rank first(id, 0, 2, 0, 0), second(id, 0, 2, 1, 0);
  wait_until([&] { return !Reports::of("identifier_reuse").empty(); }, "it is reported");
  first.abort();
  second.abort();
}
void break_wild_free() {
  check(cudaSetDevice(0), "cudaSetDevice");
  Memory<float> plain(4);
  expect(ncclMemFree(plain.data()) == ncclInvalidArgument, "ncclMemFree of cudaMalloc's memory");
}
void break_unsupported() {
  on_one([](Rank& r) {
    Memory<float> data(4);
    expect(ncclAllReduce(data.data(), data.data(), 4, ncclFloat32, ncclProd, r.comm, r.stream) == ncclInvalidArgument,
           "a product");
  });
}
void break_collective_mismatch() {
  mismatch([](Rank& r, float* data) { check(sum(r, data, r.rank == 0 ? 4 : 8), "sum"); });
}

std::map<std::string_view, void (*)()> const& breakers() {
  static std::map<std::string_view, void (*)()> const all{
      {"collective_mismatch", break_collective_mismatch},
      {"overlapping_buffers", break_overlapping_buffers},
      {"collective_stream", break_collective_stream},
      {"dead_communicator", break_dead_communicator},
      {"call_in_progress", break_call_in_progress},
      {"concurrent_calls", break_concurrent_calls},
      {"destroy_in_flight", break_destroy_in_flight},
      {"split_in_flight", break_split_in_flight},
      {"identifier_reuse", break_identifier_reuse},
      {"window_memory", break_window_memory},
      {"window_alignment", break_window_alignment},
      {"window_size", break_window_size},
      {"window_twice", break_window_twice},
      {"window_communicator", break_window_communicator},
      {"window_in_use", break_window_in_use},
      {"window_left", break_window_left},
      {"window_freed", break_window_freed},
      {"window_offset", break_window_offset},
      {"wild_free", break_wild_free},
      {"unsupported", break_unsupported},
  };
  return all;
}

}  // namespace

TEST_CASE("every rule of NCCL's is reported when it is broken, and no other", "[standin]") {
  for (auto const& rule : standin::nccl::rules) {
    INFO(rule.name);
    auto const breaker = breakers().find(rule.name);
    REQUIRE(breaker != breakers().end());
    Reports const reports;
    breaker->second();
    INFO(Reports::text());
    CHECK_FALSE(Reports::of(rule.name).empty());
    CHECK(Reports::of(rule.name).size() == Reports::size());
  }
}

TEST_CASE("ranks that disagree are named, with what they run", "[standin]") {
  auto const shows = [](std::string const& what, std::function<void(Rank&, float*)> const& enqueue) {
    Reports const reports;
    mismatch(enqueue);
    INFO(Reports::text());
    CHECK(Reports::text().find(what + " on rank 1") != std::string::npos);
    CHECK(Reports::text().find(what + " on rank 0") == std::string::npos);
    CHECK(Reports::of("collective_mismatch").size() == 2);
  };
  shows("ncclReduceScatter of 4 float32", [](Rank& r, float* data) {
    check(r.rank == 0 ? sum(r, data, 4) : ncclReduceScatter(data, data + 4, 4, ncclFloat32, ncclSum, r.comm, r.stream),
          "enqueue");
  });
  shows("ncclAllReduce of 8 float32",
        [](Rank& r, float* data) { check(sum(r, data, r.rank == 0 ? 4 : 8), "enqueue"); });
  shows("ncclAllReduce of 4 int32", [](Rank& r, float* data) {
    check(ncclAllReduce(data, data, 4, r.rank == 0 ? ncclFloat32 : ncclInt32, ncclSum, r.comm, r.stream), "enqueue");
  });
  shows("ncclBroadcast of 4 float32 from rank 1", [](Rank& r, float* data) {
    check(ncclBroadcast(data, data, 4, ncclFloat32, r.rank, r.comm, r.stream), "enqueue");
  });
}

TEST_CASE("a call of one rank that its peer does not make is reported", "[standin]") {
  Reports const reports;
  on_two([](Rank& r) {
    if (r.rank == 0) {
      ncclComm_t part = nullptr;
      expect(ncclCommSplit(r.comm, 0, 0, &part, nullptr) == ncclInvalidUsage, "split");
    } else {
      void* memory = nullptr;
      check(ncclMemAlloc(&memory, 4096), "ncclMemAlloc");
      ncclWindow_t window = nullptr;
      expect(ncclCommWindowRegister(r.comm, memory, 4096, &window, 0) == ncclInvalidUsage, "register");
      check(ncclMemFree(memory), "ncclMemFree");
    }
    r.abort();
  });
  INFO(Reports::text());
  CHECK(Reports::of("collective_mismatch").size() == 2);
  CHECK(Reports::size() == 2);
}

TEST_CASE("a collective's operands are the device's own, when it is enqueued and when it runs", "[standin]") {
  Reports const reports;
  on_one([](Rank& r) {
    std::vector<float> host(4);
    Gate gate(r.stream);
    check(sum(r, host.data(), 4), "sum");
    expect(Reports::of("device_operand").size() == 2, "input and output: " + Reports::text());
    gate.open();
    r.synchronize();
  });
  CHECK(Reports::of("device_operand").size() == 4);
  CHECK(Reports::size() == 4);
}

TEST_CASE("buffers in place and in symmetric windows are what NCCL wants of them", "[standin]") {
  Reports const reports;
  on_two([](Rank& r) {
    Window const window(r, 4096);
    auto* const data = static_cast<float*>(window.memory);
    auto* const own = data + 8 * r.rank;
    r.upload(data, std::vector<float>(64, 1.0f));
    check(ncclAllGather(own, data, 8, ncclFloat32, r.comm, r.stream), "ncclAllGather");
    check(ncclReduceScatter(data, own, 8, ncclFloat32, ncclSum, r.comm, r.stream), "ncclReduceScatter");
    check(sum(r, data, 16), "sum");
    check(ncclBroadcast(data, data, 16, ncclFloat32, 1, r.comm, r.stream), "ncclBroadcast");
    expect(r.download(data, 16) == std::vector<float>(16, 3.0f), "sums");
  });
  INFO(Reports::text());
  CHECK(Reports::size() == 0);
}

TEST_CASE("an abort ends a wait for peers that never come", "[standin]") {
  on_two([](Rank& r) {
    Memory<float> data(4);
    if (r.rank == 0) {
      check(sum(r, data.data(), 4), "sum");
      expect(cudaStreamQuery(r.stream) == cudaErrorNotReady, "it ended");
    }
    r.abort();
    r.synchronize();
  });
}
