// SPDX-License-Identifier: Apache-2.0
// The contract of a device: one suite, instantiated per model by FSDP_DEVICE_SUITE.
#pragma once

#include <fmt/format.h>

#include <atomic>
#include <cstdint>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/catch.hpp"
#include "tests/conformance/values.hpp"
#include "tests/support/devices.hpp"

// A fixture says how to get a device and what the model can promise:
//
//   struct Fixture {
//     using Device = ...;
//     static Device device();
//     static constexpr bool concurrent = true;  // streams run beside the calling thread and each other
//   };
//
// Where a stream has `enqueue(callable)`, the suite also checks what tasks that throw do.

namespace fsdp::conformance {

/// data[i] = data[i] * factor + index of the block; one block covers `chunk` elements.
struct ScaleKernel {
  template <class Block>
  FSDP_HD void operator()(Block const& block, std::int64_t index, std::int64_t* data, std::int64_t n,
                          std::int64_t chunk, std::int64_t factor) const {
    std::int64_t const begin = index * chunk;
    std::int64_t const end = begin + chunk < n ? begin + chunk : n;
    for (std::int64_t i = begin + block.thread(); i < end; i += block.threads()) data[i] = data[i] * factor + index;
  }
};

/// Stores data[0] + 1 in data[1], and so on along the array: one thread, so that each element needs the one before.
struct ChainKernel {
  template <class Block>
  FSDP_HD void operator()(Block const& block, std::int64_t, std::int64_t const* from, std::int64_t* to) const {
    if (block.thread() == 0) *to = *from + 1;
  }
};

template <class Fixture>
struct DeviceSuite {
  using D = typename Fixture::Device;
  using Stream = typename D::Stream;
  using Event = typename D::Event;
  static constexpr bool has_enqueue = requires(Stream & stream) {
    stream.enqueue([] {});
  };

  static_assert(fsdp::Device<D>);

  static std::vector<std::int64_t> counting(std::size_t n) {
    std::vector<std::int64_t> values(n);
    for (std::size_t i = 0; i < n; ++i) values[i] = static_cast<std::int64_t>(i);
    return values;
  }

  static void memory() {
    auto const device = Fixture::device();
    auto stream = device.make_stream("memory", StreamPriority::normal);
    expect(device.allocate(0) == nullptr, "allocate(0) is no nullptr");
    device.deallocate(nullptr, 0);
    for (std::size_t const bytes : {1u, 2u, 255u, 256u, 257u, 1000003u}) {
      void* const data = device.allocate(bytes);
      expect(data != nullptr && reinterpret_cast<std::uintptr_t>(data) % 256 == 0, "{} bytes at {}", bytes, data);
      device.zero_async(stream, data, bytes);
      expect_equal(download(device, stream, static_cast<unsigned char const*>(data), bytes),
                   std::vector<unsigned char>(bytes, 0), "zeroed memory");
      device.deallocate(data, bytes);
    }
    if (fsdp::testing::has_sanitizer) return;  // its allocator ends the process
    std::size_t const too_much = std::size_t{1} << 60;
    auto const text = expect_throws<ResourceError>("2^60 bytes", [&] { static_cast<void>(device.allocate(too_much)); });
    expect(text.find(std::to_string(too_much)) != std::string::npos, "the error names no size: {}", text);
  }

  static void copies() {
    auto const device = Fixture::device();
    auto stream = device.make_stream("copies", StreamPriority::high);
    for (std::size_t const n : {0u, 1u, 13u, 4096u, 300007u}) {
      Buffer<std::int64_t, D const> a(device, n), b(device, n);
      auto const values = counting(n);
      upload(device, stream, a.data(), values);
      device.copy_async(stream, b.data(), a.data(), n * sizeof(std::int64_t));
      device.zero_async(stream, a.data(), n * sizeof(std::int64_t));
      expect_equal(download(device, stream, b.data(), n), values, "a copy");
      expect_equal(download(device, stream, a.data(), n), std::vector<std::int64_t>(n, 0), "zeroing after the copy");
    }
  }

  static void launches() {
    auto const device = Fixture::device();
    auto stream = device.make_stream("launches", StreamPriority::normal);
    for (std::size_t const n : {1u, 63u, 64u, 65u, 10007u}) {
      for (std::int64_t const chunk : {std::int64_t{1}, std::int64_t{64}, std::int64_t{20000}}) {
        Buffer<std::int64_t, D const> data(device, n);
        auto const count = static_cast<std::int64_t>(n);
        auto const values = counting(n);
        upload(device, stream, data.data(), values);
        device.launch(stream, (count + chunk - 1) / chunk, ScaleKernel{}, data.data(), count, chunk, std::int64_t{3});
        device.launch(stream, std::int64_t{0}, ScaleKernel{}, data.data(), count, chunk, std::int64_t{5});
        auto expected = values;
        for (std::size_t i = 0; i < n; ++i) expected[i] = values[i] * 3 + values[i] / chunk;
        expect_equal(download(device, stream, data.data(), n), expected, "a kernel over all blocks");
      }
    }
  }

  /// One stream runs in order; two streams are ordered by events, whichever of them is late.
  static void order() {
    auto const device = Fixture::device();
    constexpr std::size_t n = 400;
    for (std::uint64_t seed = 1; seed <= 4; ++seed) {
      testing::Draws draws(seed);
      Stream streams[3] = {device.make_stream("a", StreamPriority::normal),
                           device.make_stream("b", StreamPriority::high),
                           device.make_stream("c", StreamPriority::high)};
      auto event = device.make_event();  // recorded again and again, on changing streams
      Buffer<std::int64_t, D const> data(device, n);
      device.zero_async(streams[0], data.data(), n * sizeof(std::int64_t));
      std::size_t last = 0;
      for (std::size_t i = 1; i < n; ++i) {
        auto const next = static_cast<std::size_t>(draws(2));
        if (next != last) {
          device.record(event, streams[last]);
          device.wait(streams[next], event, WaitSite::none);
        }
        if (draws(20) == 0) testing::delay(device, streams[next], draws(500));
        if (draws(20) == 0) std::this_thread::sleep_for(std::chrono::microseconds{draws(500)});
        device.launch(streams[next], std::int64_t{1}, ChainKernel{},
                      static_cast<std::int64_t const*>(data.data() + i - 1), data.data() + i);
        last = next;
      }
      expect_equal(download(device, streams[last], data.data(), n), counting(n), fmt::format("a chain, seed {}", seed));
      for (auto& stream : streams) device.synchronize(stream);
    }
  }

  /// A wait refers to the latest record before it in host order: later records of the event do not change it.
  static void latest_record() {
    auto const device = Fixture::device();
    if constexpr (Fixture::concurrent && has_enqueue) {
      auto first = device.make_stream("first", StreamPriority::normal);
      auto second = device.make_stream("second", StreamPriority::normal);
      auto waiting = device.make_stream("waiting", StreamPriority::normal);
      std::atomic<bool> open{false}, seen{false}, early{false};
      first.enqueue([&open] {
        while (!open.load()) std::this_thread::yield();
      });
      auto event = device.make_event();
      device.record(event, first);
      device.wait(waiting, event, WaitSite::none);
      waiting.enqueue([&] { early = !open.load(); });
      device.record(event, second);  // reached at once, while `first` is still busy
      auto other = device.make_stream("other", StreamPriority::normal);
      device.wait(other, event, WaitSite::none);
      other.enqueue([&] { seen = true; });
      device.synchronize(other);
      expect(seen.load(), "the second record was not reached");
      open = true;
      device.synchronize(waiting);
      expect(!early.load(), "a wait was satisfied by a record that came after it");
    }
  }

  /// Events and streams may go while work still refers to them.
  static void lifetimes() {
    auto const device = Fixture::device();
    constexpr std::size_t n = 200;
    Buffer<std::int64_t, D const> data(device, n);
    auto keeper = device.make_stream("keeper", StreamPriority::normal);
    device.zero_async(keeper, data.data(), n * sizeof(std::int64_t));
    for (std::size_t i = 1; i < n; ++i) {
      auto stream = device.make_stream("short", StreamPriority::high);
      auto before = device.make_event(), after = device.make_event();
      device.record(before, keeper);
      device.wait(stream, before, WaitSite::none);
      if (i % 50 == 1) testing::delay(device, stream, 300);
      device.launch(stream, std::int64_t{1}, ChainKernel{}, static_cast<std::int64_t const*>(data.data() + i - 1),
                    data.data() + i);
      device.record(after, stream);
      auto moved_stream = std::move(stream);
      auto moved_event = std::move(after);
      device.wait(keeper, moved_event, WaitSite::none);
      device.synchronize(moved_stream);
    }
    expect_equal(download(device, keeper, data.data(), n), counting(n), "a chain over streams that are gone");
  }

  static void errors() {
    auto const device = Fixture::device();
    auto stream = device.make_stream("usage", StreamPriority::normal);
    auto const event = device.make_event();
    auto const text = expect_throws<UsageError>("an event that was never recorded",
                                                [&] { device.wait(stream, event, WaitSite::compute_unsharded); });
    expect(text.find("compute_unsharded") != std::string::npos, "the error names no site: {}", text);
    device.synchronize(stream);
    if constexpr (Fixture::concurrent && has_enqueue) {
      auto failing = device.make_stream("failing", StreamPriority::normal);
      auto other = device.make_stream("other", StreamPriority::normal);
      std::atomic<bool> open{false}, skipped{true};
      auto reached = device.make_event();
      failing.enqueue([&open] {
        while (!open.load()) std::this_thread::yield();
        throw Failure("a task that throws");
      });
      failing.enqueue([&skipped] { skipped = false; });
      device.record(reached, failing);
      device.wait(other, reached, WaitSite::none);
      open = true;
      expect(expect_throws<Error>("synchronize", [&] { device.synchronize(other); }) == "a task that throws",
             "who waits for the record fails with another text");
      for (int again = 0; again < 2; ++again) {
        expect(expect_throws<Failure>("synchronize", [&] { device.synchronize(failing); }) == "a task that throws",
               "another exception came");
        expect_throws<Failure>("enqueue", [&] { failing.enqueue([] {}); });
        expect_throws<Failure>("record", [&] { device.record(reached, failing); });
      }
      expect(skipped.load(), "a task ran after one that threw");
    }
  }

  /// Much work at once: the queue has no bound that the host could run into.
  static void deep_queue() {
    auto const device = Fixture::device();
    auto stream = device.make_stream("deep", StreamPriority::normal);
    Buffer<std::int64_t, D const> data(device, 1);
    device.zero_async(stream, data.data(), sizeof(std::int64_t));
    testing::delay(device, stream, 2000);
    constexpr std::int64_t launches = 20000;
    for (std::int64_t i = 0; i < launches; ++i) {
      device.launch(stream, std::int64_t{1}, ChainKernel{}, static_cast<std::int64_t const*>(data.data()), data.data());
    }
    expect_equal(download(device, stream, data.data(), 1), std::vector<std::int64_t>{launches}, "a deep queue");
  }
};

}  // namespace fsdp::conformance

/// Defines the suite's test cases for one fixture; `tag` is a string like "host".
#define FSDP_DEVICE_SUITE(tag, Fixture)                                                                     \
  TEST_CASE(tag ": memory", "[device]") { fsdp::conformance::DeviceSuite<Fixture>::memory(); }              \
  TEST_CASE(tag ": copies", "[device]") { fsdp::conformance::DeviceSuite<Fixture>::copies(); }              \
  TEST_CASE(tag ": launches", "[device]") { fsdp::conformance::DeviceSuite<Fixture>::launches(); }          \
  TEST_CASE(tag ": events order streams", "[device]") { fsdp::conformance::DeviceSuite<Fixture>::order(); } \
  TEST_CASE(tag ": a wait means the latest record", "[device]") {                                           \
    fsdp::conformance::DeviceSuite<Fixture>::latest_record();                                               \
  }                                                                                                         \
  TEST_CASE(tag ": lifetimes", "[device]") { fsdp::conformance::DeviceSuite<Fixture>::lifetimes(); }        \
  TEST_CASE(tag ": errors", "[device]") { fsdp::conformance::DeviceSuite<Fixture>::errors(); }              \
  TEST_CASE(tag ": a deep queue", "[device]") { fsdp::conformance::DeviceSuite<Fixture>::deep_queue(); }    \
  static_assert(true, "")
