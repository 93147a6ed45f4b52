// SPDX-License-Identifier: Apache-2.0
// The rules of the stand-in for the CUDA runtime: each is broken on purpose, and reported by its name.
// environment: FSDP_STANDIN_DEVICES=2 FSDP_STANDIN_MEMORY=1048576
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <regex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fsdp/cuda.hpp"
#include "tests/catch.hpp"
#include "tests/standin/runtime/rules.hpp"
#include "tests/standin/runtime/runtime.hpp"
#include "tests/standin/runtime/state.hpp"
#include "tests/support/in_child.hpp"

namespace {

using fsdp::cuda::Device;

constexpr std::size_t memory_bytes = std::size_t{1} << 20;  // as the line `environment` above has it

std::mutex mutex;
std::vector<std::string> reported;
std::set<std::string> seen;

/// Gathers reports for as long as it lives.
class Reports {
 public:
  Reports() {
    standin::set_handler([](std::string_view rule, std::string const& text) {
      std::lock_guard const lock{mutex};
      reported.emplace_back(rule);
      seen.emplace(rule);
      last_text = text;
    });
  }
  Reports(Reports const&) = delete;
  Reports& operator=(Reports const&) = delete;
  ~Reports() { standin::set_handler(nullptr); }

  /// Reports since the last call.
  static std::vector<std::string> taken() {
    std::lock_guard const lock{mutex};
    static_cast<void>(cudaGetLastError());
    return std::exchange(reported, {});
  }
  static inline std::string last_text;
};
using Names = std::vector<std::string>;

struct Fill {
  static constexpr int threads = 32;
  template <class Block>
  void operator()(Block const& block, std::int64_t, std::int64_t* to, std::int64_t at) const {
    if (block.thread() == 0) to[at] = 1;
  }
};
struct Large {
  static constexpr int threads = 64;
  static constexpr std::size_t shared_bytes = 64 * 1024;
  template <class Block>
  void operator()(Block const& block, std::int64_t, std::int64_t* to) const {
    if (block.thread() == 0) *to = *reinterpret_cast<std::int64_t*>(block.shared());
  }
};
struct Pointers {
  std::int64_t count;
  std::int64_t* pointer;
};
/// The last four bytes of a word are nobody's.
struct Padded {
  std::int64_t* pointer;
  std::int32_t count;
};
struct Ignore {
  template <class Block>
  void operator()(Block const&, std::int64_t, Pointers) const {}
  template <class Block>
  void operator()(Block const&, std::int64_t, Padded) const {}
};
struct HalfWaits {
  static constexpr int threads = 64;
  template <class Block>
  void operator()(Block const& block, std::int64_t, int half) const {
    if (block.thread() < half) block.sync();
  }
};
struct Ladle {
  std::byte bytes[32768];
};
struct TakesMuch {
  template <class Block>
  void operator()(Block const&, std::int64_t, Ladle) const {}
};

template <class Kernel, class... Args>
void const* address() {
  return reinterpret_cast<void const*>(fsdp::cuda::detail::run_kernel<Kernel, Args...>);
}
template <class Kernel, class... Args>
cudaError_t launch(cudaStream_t stream, dim3 grid, unsigned threads, std::size_t shared, Args... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, fsdp::cuda::detail::run_kernel<Kernel, Args...>, args...);
}

/// Streams, events and memory of device 0, which is current.
struct Things {
  Device device{0};
  cudaStream_t stream = nullptr;
  cudaEvent_t event = nullptr;
  std::int64_t* memory = nullptr;
  std::int64_t* pinned = nullptr;
  static constexpr std::size_t bytes = 8 * sizeof(std::int64_t);

  Things() {
    FSDP_CUDA_CHECK(cudaSetDevice(0));
    FSDP_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    FSDP_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    memory = static_cast<std::int64_t*>(device.allocate(bytes));
    pinned = static_cast<std::int64_t*>(device.allocate_pinned(bytes));
  }
  Things(Things const&) = delete;
  Things& operator=(Things const&) = delete;
  ~Things() {
    static_cast<void>(cudaSetDevice(0));
    static_cast<void>(cudaStreamSynchronize(stream));
    static_cast<void>(cudaStreamDestroy(stream));
    static_cast<void>(cudaEventDestroy(event));
    device.deallocate(memory, bytes);
    device.deallocate_pinned(pinned);
  }
  cudaError_t fill(std::int64_t* to, std::int64_t at = 0) { return launch<Fill>(stream, 1, 32, 512, to, at); }
};

/// Holds a stream back until it is opened, or goes.
struct Gate {
  std::atomic<bool> open{false};
  cudaStream_t stream;
  explicit Gate(cudaStream_t which, standin::WorkKind kind = standin::WorkKind::local) : stream(which) {
    REQUIRE(standin::enqueue(
                stream, "a gate", [this] { return open.load(); }, kind) == cudaSuccess);
  }
  Gate(Gate const&) = delete;
  Gate& operator=(Gate const&) = delete;
  ~Gate() {
    open = true;
    static_cast<void>(cudaStreamSynchronize(stream));
  }
};

}  // namespace

TEST_CASE("handles are used while they live", "[standin]") {
  Reports const reports;
  Things things;
  cudaStream_t stream = nullptr;
  REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  REQUIRE(cudaStreamDestroy(stream) == cudaSuccess);
  CHECK(cudaStreamSynchronize(stream) == cudaErrorInvalidResourceHandle);
  CHECK(cudaStreamDestroy(stream) == cudaErrorInvalidResourceHandle);
  CHECK(standin::enqueue(stream, "work", [] { return true; }) == cudaErrorInvalidResourceHandle);
  CHECK(reports.taken() == Names(3, "dead_handle"));
  cudaEvent_t event = nullptr;
  REQUIRE(cudaEventCreateWithFlags(&event, cudaEventDisableTiming) == cudaSuccess);
  REQUIRE(cudaEventRecord(event, things.stream) == cudaSuccess);
  REQUIRE(cudaStreamWaitEvent(things.stream, event, 0) == cudaSuccess);
  REQUIRE(cudaEventDestroy(event) == cudaSuccess);  // while the stream may still have to reach it
  CHECK(cudaEventRecord(event, things.stream) == cudaErrorInvalidResourceHandle);
  CHECK(cudaEventQuery(event) == cudaErrorInvalidResourceHandle);
  CHECK(cudaEventSynchronize(nullptr) == cudaErrorInvalidResourceHandle);
  CHECK(reports.taken() == Names(3, "dead_handle"));
}

TEST_CASE("nothing goes to the default stream", "[standin]") {
  Reports const reports;
  Things things;
  for (cudaStream_t const stream : {cudaStream_t{}, cudaStreamLegacy, cudaStreamPerThread}) {
    CHECK(cudaMemsetAsync(things.memory, 0, 8, stream) != cudaSuccess);
    CHECK(launch<Fill>(stream, 1, 32, 512, things.memory, std::int64_t{0}) != cudaSuccess);
    CHECK(cudaEventRecord(things.event, stream) != cudaSuccess);
    CHECK(cudaStreamSynchronize(stream) != cudaSuccess);
  }
  CHECK(reports.taken() == Names(12, "default_stream"));
}

TEST_CASE("streams, events and the current device agree where CUDA says so", "[standin]") {
  Reports const reports;
  Things things;
  REQUIRE(cudaEventRecord(things.event, things.stream) == cudaSuccess);
  REQUIRE(cudaSetDevice(1) == cudaSuccess);
  cudaStream_t stream = nullptr;
  REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  CHECK(standin::device_of(stream) == 1);

  CHECK(things.fill(things.memory) == cudaErrorInvalidResourceHandle);
  CHECK(reports.taken() == Names{"launch_device"});
  static_cast<void>(cudaMemsetAsync(things.memory, 0, 8, things.stream));
  CHECK(reports.taken() == Names{"set_device"});
  CHECK(cudaEventRecord(things.event, stream) == cudaErrorInvalidResourceHandle);
  CHECK(reports.taken() == Names{"record_device"});

  // Allowed with any device current: copies, waits across devices, questions, records where event and stream agree.
  CHECK(cudaMemcpyAsync(things.memory, things.pinned, 8, cudaMemcpyDefault, things.stream) == cudaSuccess);
  CHECK(cudaStreamWaitEvent(stream, things.event, 0) == cudaSuccess);
  CHECK(cudaEventRecord(things.event, things.stream) == cudaSuccess);
  CHECK(cudaEventSynchronize(things.event) == cudaSuccess);
  CHECK(cudaEventQuery(things.event) == cudaSuccess);
  CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
  CHECK(cudaStreamDestroy(stream) == cudaSuccess);
  CHECK(reports.taken().empty());
}

TEST_CASE("events that were never recorded order nothing", "[standin]") {
  Reports const reports;
  Things things;
  CHECK(cudaStreamWaitEvent(things.stream, things.event, 0) == cudaSuccess);
  CHECK(cudaEventQuery(things.event) == cudaSuccess);
  CHECK(cudaEventSynchronize(things.event) == cudaSuccess);
  CHECK(reports.taken() == Names(3, "unrecorded_event"));
}

TEST_CASE("time is asked of events that keep it", "[standin]") {
  Reports const reports;
  Things things;
  float milliseconds = 0;
  cudaEvent_t timed = nullptr;
  REQUIRE(cudaEventCreateWithFlags(&timed, cudaEventDefault) == cudaSuccess);
  CHECK(cudaEventElapsedTime(&milliseconds, timed, timed) == cudaErrorInvalidResourceHandle);  // not recorded
  CHECK(reports.taken() == Names{"untimed_event"});
  {
    Gate gate(things.stream);
    REQUIRE(cudaEventRecord(timed, things.stream) == cudaSuccess);
    REQUIRE(cudaEventRecord(things.event, things.stream) == cudaSuccess);
    CHECK(cudaEventElapsedTime(&milliseconds, timed, timed) == cudaErrorNotReady);
    CHECK(cudaEventQuery(timed) == cudaErrorNotReady);
    CHECK(cudaStreamQuery(things.stream) == cudaErrorNotReady);
    CHECK(cudaGetLastError() == cudaErrorNotReady);
  }
  CHECK(cudaEventElapsedTime(&milliseconds, timed, timed) == cudaSuccess);
  CHECK(reports.taken().empty());
  CHECK(cudaEventElapsedTime(&milliseconds, timed, things.event) == cudaErrorInvalidResourceHandle);
  CHECK(reports.taken() == Names{"untimed_event"});
  CHECK(cudaEventDestroy(timed) == cudaSuccess);
}

TEST_CASE("launches keep the limits", "[standin]") {
  Reports const reports;
  Things things;
  auto const try_launch = [&](dim3 grid, unsigned threads, std::size_t shared) {
    return launch<Fill>(things.stream, grid, threads, shared, things.memory, std::int64_t{0});
  };
  CHECK(try_launch(1, 32, 48 * 1024) == cudaSuccess);
  CHECK(reports.taken().empty());
  for (auto const& grid : {dim3(0), dim3(0x80000000u), dim3(1, 2), dim3(1, 1, 0)})
    CHECK(try_launch(grid, 32, 512) == cudaErrorInvalidConfiguration);
  CHECK(reports.taken() == Names(4, "grid"));
  for (unsigned const threads : {0u, 64u, 33u, 1056u}) CHECK(try_launch(1, threads, 512) != cudaSuccess);
  CHECK(reports.taken() == Names(4, "threads"));
  CHECK(launch<TakesMuch>(things.stream, 1, 32, 512, Ladle{}) == cudaErrorInvalidValue);
  CHECK(reports.taken() == Names{"parameters"});

  cudaLaunchConfig_t config{};
  config.gridDim = dim3(1);
  config.blockDim = dim3(32);
  config.stream = things.stream;
  CHECK(cudaLaunchKernelExC(&config, &config, nullptr) == cudaErrorInvalidDeviceFunction);
  CHECK(reports.taken() == Names{"unknown_kernel"});
  cudaLaunchAttribute attribute{};
  config.attrs = &attribute;
  config.numAttrs = 1;
  std::int64_t at = 0;
  std::array<void*, 2> arguments{&things.memory, &at};
  CHECK(cudaLaunchKernelExC(&config, address<Fill, std::int64_t*, std::int64_t>(), arguments.data()) ==
        cudaErrorNotSupported);
  CHECK(reports.taken() == Names{"launch_attributes"});
}

TEST_CASE("much shared memory is asked for on each device", "[standin]") {
  Reports const reports;
  Things things;
  auto const attribute = [](int bytes) {
    return cudaFuncSetAttribute(address<Large, std::int64_t*>(), cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  };
  std::size_t const bytes = 64 * 1024 + 512;
  CHECK(launch<Large>(things.stream, 1, 64, bytes, things.memory) == cudaErrorInvalidValue);
  CHECK(reports.taken() == Names{"shared_memory"});
  REQUIRE(cudaSetDevice(1) == cudaSuccess);
  CHECK(attribute(static_cast<int>(bytes)) == cudaSuccess);
  REQUIRE(cudaSetDevice(0) == cudaSuccess);
  CHECK(launch<Large>(things.stream, 1, 64, bytes, things.memory) == cudaErrorInvalidValue);
  CHECK(reports.taken() == Names{"shared_memory"});
  CHECK(attribute(static_cast<int>(bytes)) == cudaSuccess);
  CHECK(launch<Large>(things.stream, 1, 64, bytes, things.memory) == cudaSuccess);
  CHECK(reports.taken().empty());
  CHECK(attribute(227 * 1024 + 1) == cudaErrorInvalidValue);
  CHECK(reports.taken() == Names{"shared_memory"});

  // And the library asks for it where it is needed.
  CHECK(cudaStreamSynchronize(things.stream) == cudaSuccess);
  auto stream = things.device.make_stream("large");
  things.device.launch(stream, 1, Large{}, things.memory);
  things.device.synchronize(stream);
  CHECK(reports.taken().empty());
}

TEST_CASE("a kernel's pointers are of its device, of pinned memory or of a peer's", "[standin]") {
  Reports const reports;
  Things things;
  std::int64_t on_stack = 0;
  std::vector<std::int64_t> on_heap(100000);
  std::int64_t* far = nullptr;
  REQUIRE(cudaSetDevice(1) == cudaSuccess);
  REQUIRE(cudaMalloc(reinterpret_cast<void**>(&far), 8) == cudaSuccess);
  REQUIRE(cudaSetDevice(0) == cudaSuccess);
  auto const pass = [&](std::int64_t* pointer) {
    return launch<Ignore>(things.stream, 1, 32, 512, Pointers{1, pointer});
  };
  for (auto* const good : {things.memory, things.pinned, things.memory + 8, static_cast<std::int64_t*>(nullptr)})
    CHECK(pass(good) == cudaSuccess);  // one behind the end too: an empty view may begin there
  CHECK(reports.taken().empty());
  // Stale bytes between members are no pointer.
  Padded padded{things.memory, 0};
  auto const stack = reinterpret_cast<std::uintptr_t>(&on_stack);
  std::memcpy(reinterpret_cast<std::byte*>(&padded) + 8, &stack, 8);
  CHECK(launch<Ignore>(things.stream, 1, 32, 512, padded) == cudaSuccess);
  CHECK(reports.taken().empty());
  for (auto* const bad : {&on_stack, on_heap.data()}) static_cast<void>(pass(bad));
  CHECK(reports.taken() == Names(2, "kernel_argument"));
  static_cast<void>(pass(far));
  CHECK(reports.taken() == Names{"device_operand"});
  CHECK(cudaDeviceEnablePeerAccess(1, 0) == cudaSuccess);
  CHECK(cudaDeviceEnablePeerAccess(1, 0) == cudaErrorPeerAccessAlreadyEnabled);
  static_cast<void>(cudaGetLastError());
  static_cast<void>(pass(far));
  standin::expect_device_operand(0, far, 8, "operand");
  CHECK(reports.taken().empty());
  CHECK(cudaDeviceDisablePeerAccess(1) == cudaSuccess);
  standin::expect_device_operand(0, far, 8, "operand");
  standin::expect_device_operand(0, &on_stack, 8, "operand");
  CHECK(reports.taken() == Names(2, "device_operand"));
  CHECK(cudaMemcpyAsync(things.memory, far, 8, cudaMemcpyDefault, things.stream) ==
        cudaSuccess);  // needs no peer access
  CHECK(cudaStreamSynchronize(things.stream) == cudaSuccess);
  CHECK(reports.taken().empty());
  CHECK(cudaFree(far) == cudaSuccess);
  static_cast<void>(pass(far));
  standin::expect_device_operand(1, far, 8, "operand");
  CHECK(reports.taken() == Names(2, "freed_memory"));
}

TEST_CASE("the threads of a block meet", "[standin]") {
  Reports const reports;
  Things things;
  CHECK(launch<HalfWaits>(things.stream, 1, 64, 512, 32) == cudaSuccess);
  CHECK(cudaStreamSynchronize(things.stream) == cudaSuccess);
  CHECK(reports.taken() == Names{"kernel_failure"});
  CHECK(standin::enqueue(things.stream, "work", []() -> bool { throw std::runtime_error("no"); }) == cudaSuccess);
  CHECK(cudaStreamSynchronize(things.stream) == cudaSuccess);
  CHECK(reports.taken() == Names{"throwing_work"});
}

TEST_CASE("copies and settings stay within an allocation", "[standin]") {
  Reports const reports;
  Things things;
  std::vector<std::byte> host(64);
  auto const copy = [&](void* to, void const* from, std::size_t bytes, cudaMemcpyKind kind = cudaMemcpyDefault) {
    return cudaMemcpyAsync(to, from, bytes, kind, things.stream);
  };
  CHECK(copy(things.memory, host.data(), 64) == cudaSuccess);
  CHECK(copy(things.memory + 4, things.memory, 32) == cudaSuccess);
  CHECK(cudaMemsetAsync(things.memory, 0, 64, things.stream) == cudaSuccess);
  CHECK(cudaStreamSynchronize(things.stream) == cudaSuccess);
  CHECK(reports.taken().empty());
  CHECK(copy(things.memory, things.pinned, 65) == cudaErrorInvalidValue);
  CHECK(copy(things.pinned + 1, things.memory, 57) == cudaErrorInvalidValue);
  CHECK(copy(things.memory + 8, host.data(), 8) == cudaErrorInvalidValue);
  CHECK(cudaMemsetAsync(things.memory + 1, 0, 64, things.stream) == cudaErrorInvalidValue);
  standin::expect_device_operand(0, things.memory, 65, "operand");
  CHECK(reports.taken() == Names(6, "out_of_range"));  // both ends of the first
  CHECK(cudaMemsetAsync(host.data(), 0, 64, things.stream) == cudaErrorInvalidValue);
  CHECK(reports.taken() == Names{"device_operand"});
  CHECK(copy(things.memory, things.memory + 1, 16) == cudaErrorInvalidValue);
  CHECK(reports.taken() == Names{"overlapping_copy"});
  CHECK(copy(things.memory, host.data(), 8, cudaMemcpyDeviceToHost) == cudaErrorInvalidMemcpyDirection);
  CHECK(copy(things.memory, things.memory + 4, 8, cudaMemcpyHostToDevice) == cudaErrorInvalidMemcpyDirection);
  CHECK(reports.taken() == Names(2, "copy_kind"));
}

TEST_CASE("what is freed was allocated, is not used again, and not by work that is pending", "[standin]") {
  Reports const reports;
  Things things;
  void* memory = nullptr;
  REQUIRE(cudaMalloc(&memory, 64) == cudaSuccess);
  CHECK(cudaFree(static_cast<std::byte*>(memory) + 8) == cudaErrorInvalidValue);
  CHECK(cudaFreeHost(memory) == cudaErrorInvalidValue);
  CHECK(reports.taken() == Names(2, "wild_free"));
  CHECK(cudaFree(memory) == cudaSuccess);
  CHECK(cudaFree(memory) == cudaErrorInvalidValue);
  CHECK(cudaFree(&memory) == cudaErrorInvalidValue);
  CHECK(reports.taken() == Names(2, "wild_free"));
  CHECK(cudaFree(nullptr) == cudaSuccess);
  CHECK(cudaFreeHost(nullptr) == cudaSuccess);
  CHECK(cudaMemcpyAsync(memory, things.memory, 8, cudaMemcpyDefault, things.stream) == cudaErrorInvalidValue);
  CHECK(cudaMemcpyAsync(things.memory, memory, 8, cudaMemcpyDefault, things.stream) == cudaErrorInvalidValue);
  CHECK(cudaMemsetAsync(memory, 0, 8, things.stream) == cudaErrorInvalidValue);
  CHECK(reports.taken() == Names(3, "freed_memory"));

  void* pinned = nullptr;
  REQUIRE(cudaHostAlloc(&pinned, 64, cudaHostAllocPortable) == cudaSuccess);
  {
    Gate gate(things.stream);
    REQUIRE(cudaMemcpyAsync(things.memory, pinned, 8, cudaMemcpyDefault, things.stream) == cudaSuccess);
    CHECK(cudaFreeHost(pinned) == cudaSuccess);
    CHECK(reports.taken() == Names{"freed_while_pending"});
  }
  // cudaFree waits for its own device: a peer's copy is not its concern.
  REQUIRE(cudaMalloc(&memory, 64) == cudaSuccess);
  REQUIRE(cudaSetDevice(1) == cudaSuccess);
  auto stream = Device(1).make_stream("peer");
  {
    Gate gate(stream.get());
    REQUIRE(cudaMemcpyAsync(things.pinned, memory, 8, cudaMemcpyDefault, stream.get()) == cudaSuccess);
    CHECK(cudaFree(memory) == cudaSuccess);
    CHECK(reports.taken() == Names{"freed_while_pending"});
  }
}

TEST_CASE("cudaFree waits for the device's streams", "[standin]") {
  Reports const reports;
  Things things;
  void* memory = nullptr;
  for (auto const kind : {standin::WorkKind::local, standin::WorkKind::collective}) {
    REQUIRE(cudaMalloc(&memory, 64) == cudaSuccess);
    auto const waits = standin::synchronizations(), before = standin::calls("cudaFree");
    std::atomic<bool> opened{false};
    Gate gate(things.stream, kind);
    REQUIRE(cudaMemsetAsync(memory, 0, 64, things.stream) == cudaSuccess);
    std::thread opener([&] {
      while (standin::calls("cudaFree") == before) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::milliseconds{10});
      opened = true;
      gate.open = true;
    });
    CHECK(cudaFree(memory) == cudaSuccess);
    CHECK(opened);
    opener.join();
    CHECK(standin::synchronizations() == waits + 1);
    CHECK(reports.taken() == (kind == standin::WorkKind::local ? Names{} : Names{"free_waits_for_collective"}));
  }
}

TEST_CASE("device memory has a size, and begins as NaN", "[standin]") {
  Reports const reports;
  Things things;
  auto const before = standin::allocated();
  auto const calls = standin::calls("cudaMalloc");
  std::size_t free = 0, total = 0;
  REQUIRE(cudaMemGetInfo(&free, &total) == cudaSuccess);
  CHECK(total == memory_bytes);
  void *most = nullptr, *more = nullptr;
  CHECK(cudaMalloc(&most, free) == cudaSuccess);
  CHECK(cudaMalloc(&more, 1) == cudaErrorMemoryAllocation);
  CHECK(cudaGetLastError() == cudaErrorMemoryAllocation);
  CHECK(cudaGetLastError() == cudaSuccess);
  CHECK(standin::calls("cudaMalloc") == calls + 2);
  CHECK(standin::allocated().device == before.device + 1);
  CHECK(standin::allocated().device_bytes == before.device_bytes + static_cast<std::int64_t>(free));
  CHECK(standin::allocated().pinned == before.pinned);
  REQUIRE(cudaMemcpyAsync(things.pinned, most, 64, cudaMemcpyDefault, things.stream) == cudaSuccess);
  REQUIRE(cudaStreamSynchronize(things.stream) == cudaSuccess);
  CHECK(std::all_of(things.pinned, things.pinned + 8, [](std::int64_t word) { return word == -1; }));
  CHECK(cudaFree(most) == cudaSuccess);
  CHECK(cudaMalloc(&more, 1) == cudaSuccess);
  CHECK(cudaFree(more) == cudaSuccess);
  CHECK(reports.taken().empty());
}

#if !defined(__SANITIZE_ADDRESS__)
TEST_CASE("what is written beside an allocation is noticed", "[standin]") {
  Reports const reports;
  Things things;
  for (std::int64_t const at : {8, -1}) {
    void* memory = nullptr;
    REQUIRE(cudaMalloc(&memory, 64) == cudaSuccess);
    CHECK(things.fill(static_cast<std::int64_t*>(memory), at) == cudaSuccess);
    CHECK(cudaFree(memory) == cudaSuccess);
    CHECK(reports.taken() == Names{"overrun"});
  }
}
#endif

// Sanitizers have words of their own, and their threads do not survive fork().
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
namespace {
template <class Action>
fsdp::testing::ChildOutcome ending_of(Action const& action) {
  return fsdp::testing::in_child([&] {
    std::signal(SIGABRT, SIG_DFL);  // which Catch2 handles
    action();
  });
}
}  // namespace

TEST_CASE("an access outside of all allocations ends the process with its kernel's name", "[standin]") {
  auto const ending = ending_of([] {
    Things things;
    static_cast<void>(things.fill(things.memory, 100));
    static_cast<void>(cudaStreamSynchronize(things.stream));
  });
  CHECK(ending.code == -1);
  // A source that is merged with others is in a namespace of its own.
  CHECK(std::regex_search(ending.text,
                          std::regex(R"(standin: bad_access: (\w+::)?\(anonymous namespace\)::Fill touched)")));
  CHECK(ending.text.find("behind 64 bytes of device 0") != std::string::npos);
  seen.insert("bad_access");
}
TEST_CASE("the host reaches no device memory, where the processor can hold it back", "[standin]") {
  seen.insert("host_access");
  if (!standin::device_memory_is_protected()) return;
  auto const ending = ending_of([] {
    Things things;
    *things.memory = 1;
  });
  CHECK(ending.code == -1);
  CHECK(ending.text.find("standin: host_access: the host touched") != std::string::npos);
}
TEST_CASE("a report ends the process unless a test takes it", "[standin]") {
  auto const ending = ending_of([] { standin::report(standin::rule("grid"), "too large"); });
  CHECK(ending.code == -1);
  CHECK(ending.text == "standin: grid: too large\n");
}
TEST_CASE("what was never freed is listed", "[standin]") {
  auto const ending = ending_of([] {
    Things things;
    void* memory = nullptr;
    static_cast<void>(cudaMalloc(&memory, 77));
    standin::list_leaks();
  });
  CHECK(ending.text.find("standin: never freed: 77 bytes of device 0") != std::string::npos);
  CHECK(ending.text.find("standin: never destroyed: stream") != std::string::npos);
  CHECK(ending.text.find("standin: never destroyed: 1 events") != std::string::npos);
}
TEST_CASE("every rule of the table is broken here", "[standin]") {
  for (auto const& rule : standin::rules) {
    CAPTURE(rule.name);
    CHECK(seen.count(std::string(rule.name)) == 1);
    CHECK_FALSE(rule.sentence.empty());
    CHECK_FALSE(rule.source.empty());
  }
}
#endif

TEST_CASE("a device that failed stays so, and nobody waits for it", "[standin]") {
  Reports const reports;
  Things things;
  REQUIRE(cudaSetDevice(1) == cudaSuccess);
  cudaStream_t stream = nullptr;
  REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  std::atomic<bool> ran{false};
  REQUIRE(standin::enqueue(stream, "a collective", [] { return false; }) == cudaSuccess);
  REQUIRE(standin::enqueue(stream, "work", [&ran] { return ran = true; }) == cudaSuccess);
  standin::fail_device(1, cudaErrorECCUncorrectable);
  CHECK(cudaStreamSynchronize(stream) == cudaErrorECCUncorrectable);
  CHECK(standin::enqueue(stream, "work", [] { return true; }) == cudaErrorECCUncorrectable);
  CHECK(cudaGetLastError() == cudaErrorECCUncorrectable);
  CHECK(cudaGetLastError() == cudaErrorECCUncorrectable);
  CHECK_FALSE(ran);
  CHECK(cudaStreamDestroy(stream) == cudaErrorECCUncorrectable);
  REQUIRE(cudaSetDevice(0) == cudaSuccess);
  CHECK(cudaGetLastError() == cudaErrorECCUncorrectable);
  CHECK(cudaGetLastError() == cudaSuccess);
  CHECK(things.fill(things.memory) == cudaSuccess);
  CHECK(cudaStreamSynchronize(things.stream) == cudaSuccess);
  CHECK(reports.taken().empty());
}
