// SPDX-License-Identifier: Apache-2.0
// cuda::Device: what every device must do, and what only CUDA has.
// timeout: 470
#include "fsdp/cuda.hpp"

#include <cstdint>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "tests/catch.hpp"
#include "tests/conformance/device_suite.hpp"
#include "tests/conformance/gpu.hpp"
#include "tests/conformance/values.hpp"
#include "tests/support/devices.hpp"

namespace {

using fsdp::conformance::Buffer;
using fsdp::conformance::download;
using fsdp::conformance::upload;
using fsdp::cuda::Device;
using fsdp::cuda::Event;
using fsdp::cuda::Stream;

bool const ready = fsdp::testing::need_gpu();

struct Cuda {
  using Device = fsdp::cuda::Device;
  static Device device() { return Device(); }
  static constexpr bool concurrent = true;
};
struct Delayed {
  using Device = fsdp::testing::DelayDevice<fsdp::cuda::Device>;
  static Device device() { return {fsdp::cuda::Device(), 42, 20}; }
  static constexpr bool concurrent = true;
};

static_assert(!std::is_copy_constructible_v<Stream> && !std::is_copy_constructible_v<Event>);
static_assert(!std::is_constructible_v<fsdp::cuda::UniqueStream, int>);
static_assert(!std::is_constructible_v<fsdp::cuda::UniqueStream, std::nullptr_t>);

/// Every block writes its number of threads.
struct CountThreads {
  template <class Block>
  FSDP_HD void operator()(Block const& block, std::int64_t index, std::int64_t* out) const {
    if (block.thread() == 0) out[index] = block.threads();
  }
};
struct CountThreadsOf96 : CountThreads {
  static constexpr int threads = 96;
};

template <class Action>
std::string error_of(Action const& action) {
  try {
    action();
  } catch (fsdp::Error const& error) {
    return error.what();
  }
  return "";
}
bool contains(std::string const& text, std::string const& part) { return text.find(part) != std::string::npos; }

}  // namespace

FSDP_DEVICE_SUITE("cuda", Cuda);
FSDP_DEVICE_SUITE("cuda, delayed", Delayed);

TEST_CASE("cuda: blocks have as many threads as the kernel declares, 256 otherwise", "[device]") {
  Device const device;
  auto stream = device.make_stream("test");
  Buffer<std::int64_t, Device const> counts(device, 100);
  device.launch(stream, 100, CountThreads{}, counts.data());
  CHECK(download(device, stream, counts.data(), 100) == std::vector<std::int64_t>(100, 256));
  device.launch(stream, 100, CountThreadsOf96{}, counts.data());
  CHECK(download(device, stream, counts.data(), 100) == std::vector<std::int64_t>(100, 96));
  device.launch(stream, 0, CountThreads{}, static_cast<std::int64_t*>(nullptr));
  device.synchronize(stream);
}

TEST_CASE("cuda: a launch of more blocks than a grid holds is refused", "[device]") {
  Device const device;
  auto stream = device.make_stream("test");
  for (auto const blocks : {std::int64_t{1} << 31, (std::int64_t{1} << 32) + 1}) {
    auto const text =
        error_of([&] { device.launch(stream, blocks, CountThreads{}, static_cast<std::int64_t*>(nullptr)); });
    CHECK(contains(text, "cudaErrorInvalidConfiguration"));
  }
  Buffer<std::int64_t, Device const> counts(device, 1);
  device.launch(stream, 1, CountThreads{}, counts.data());
  CHECK(download(device, stream, counts.data(), 1) == std::vector<std::int64_t>{256});
}

TEST_CASE("cuda: the caller's stream is adopted and survives", "[device]") {
  Device const device;
  device.make_current();
  cudaStream_t raw = nullptr;
  FSDP_CUDA_CHECK(cudaStreamCreateWithFlags(&raw, cudaStreamNonBlocking));
  Buffer<std::int64_t, Device const> counts(device, 4);
  {
    auto view = Stream::adopt(raw);
    CHECK_FALSE(view.owns());
    CHECK(view.get() == raw);
    device.launch(view, 4, CountThreads{}, counts.data());
    auto owned = device.make_stream("test");
    CHECK(owned.owns());
    auto event = device.make_event();
    device.record(event, view);
    device.wait(owned, event);
    CHECK(download(device, owned, counts.data(), 4) == std::vector<std::int64_t>(4, 256));
  }
  FSDP_CUDA_CHECK(cudaStreamSynchronize(raw));
  FSDP_CUDA_CHECK(cudaStreamDestroy(raw));
}

TEST_CASE("cuda: streams and events that were moved from are refused", "[device]") {
  Device const device;
  auto stream = device.make_stream("test");
  auto event = device.make_event();
  auto other_stream = std::move(stream);
  device.record(event, other_stream);
  auto other_event = std::move(event);
  CHECK(other_event.recorded());
  CHECK_THROWS_AS(device.synchronize(stream), fsdp::UsageError);
  CHECK_THROWS_AS(device.record(event, other_stream), fsdp::UsageError);
  CHECK_THROWS_AS(device.wait(other_stream, event), fsdp::UsageError);
  device.wait(other_stream, other_event);
  device.synchronize(other_stream);
}

TEST_CASE("cuda: a wait on an event that was never recorded is refused, with its site", "[device]") {
  Device const device;
  auto stream = device.make_stream("test");
  auto const event = device.make_event();
  auto const text = error_of([&] { device.wait(stream, event, fsdp::WaitSite::reduce_gradients); });
  CHECK(contains(text, "never recorded"));
  CHECK(contains(text, "reduce_gradients"));
}

TEST_CASE("cuda: an allocation that fails names the bytes, and leaves the device usable", "[device]") {
  Device const device;
  CHECK_THROWS_AS(device.allocate(std::size_t{1} << 60), fsdp::ResourceError);
  auto const text = error_of([&] { device.allocate(std::size_t{1} << 60); });
  CHECK(contains(text, std::to_string(std::size_t{1} << 60)));
  CHECK(contains(text, std::to_string(device.memory().total)));
  auto stream = device.make_stream("test");
  Buffer<std::int64_t, Device const> counts(device, 1);
  device.launch(stream, 1, CountThreads{}, counts.data());
  CHECK(download(device, stream, counts.data(), 1) == std::vector<std::int64_t>{256});
  CHECK(cudaGetLastError() == cudaSuccess);
}

TEST_CASE("cuda: failed calls throw the call's text and CUDA's words", "[device]") {
  auto const text = error_of([] { FSDP_CUDA_CHECK(cudaSetDevice(12345)); });
  CHECK(contains(text, "cudaSetDevice(12345)"));
  CHECK(contains(text, "cudaErrorInvalidDevice"));
  CHECK(cudaGetLastError() == cudaSuccess);
  CHECK_THROWS_AS(Device(12345), fsdp::ConfigError);
}

TEST_CASE("cuda: pinned memory is copied both ways", "[device]") {
  Device const device;
  auto stream = device.make_stream("test");
  auto* const host = static_cast<std::int64_t*>(device.allocate_pinned(2000 * sizeof(std::int64_t)));
  for (std::int64_t i = 0; i < 1000; ++i) host[i] = i;
  Buffer<std::int64_t, Device const> data(device, 1000);
  device.copy_async(stream, data.data(), host, 1000 * sizeof(std::int64_t));
  device.copy_async(stream, host + 1000, data.data(), 1000 * sizeof(std::int64_t));
  device.synchronize(stream);
  for (std::int64_t i = 0; i < 1000; ++i) REQUIRE(host[1000 + i] == i);
  device.deallocate_pinned(host);
}

TEST_CASE("cuda: events tell whether they are done, and timed ones how far apart they are", "[device]") {
  for (bool const timed : {false, true}) {
    fsdp::cuda::DeviceOptions options;
    options.timed_events = timed;
    Device const device(0, options);
    auto stream = device.make_stream("test");
    auto start = timed ? device.make_event() : device.make_timed_event();
    auto stop = device.make_timed_event();
    device.record(start, stream);
    fsdp::testing::delay(device, stream, 2000);
    device.record(stop, stream);
    device.synchronize(stream);
    CHECK(device.is_done(stop));
    CHECK(device.elapsed_milliseconds(start, stop) > 0);
  }
}

TEST_CASE("cuda: threads use devices side by side", "[device]") {
  int const devices = fsdp::cuda::device_count();
  std::vector<std::string> errors(4);
  std::vector<std::thread> threads;
  for (int id = 0; id < 4; ++id) {
    threads.emplace_back([id, devices, &errors] {
      auto const index = static_cast<std::size_t>(id);
      errors[index] = error_of([&] {
        Device const device(id % devices);
        auto stream = device.make_stream("test", fsdp::StreamPriority::high);
        auto event = device.make_event();
        Buffer<std::int64_t, Device const> counts(device, 64);
        for (int round = 0; round < 50; ++round) {
          device.zero_async(stream, counts.data(), 64 * sizeof(std::int64_t));
          device.launch(stream, 64, CountThreads{}, counts.data());
          device.record(event, stream);
          if (download(device, stream, counts.data(), 64) != std::vector<std::int64_t>(64, 256))
            fsdp::fail<fsdp::Error>("thread {}: wrong values", id);
        }
      });
    });
  }
  for (auto& thread : threads) thread.join();
  for (auto const& error : errors) CHECK(error == "");
}

TEST_CASE("cuda: names and ranges for profilers do no harm", "[device]") {
  std::string const longer(1000, 'x');
  fsdp::cuda::NvtxRange const outer("block.3", "backward");
  fsdp::cuda::NvtxRange const inner(longer, longer, longer);
  Device const device;
  auto stream = device.make_stream(longer);
  device.synchronize(stream);
  CHECK(contains(device.description(), "cuda:0 "));
}
