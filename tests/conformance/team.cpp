// SPDX-License-Identifier: Apache-2.0
// The threads of a host stream: every part of a task runs once, on a lane of its own, before the next task; what parts
// throw; and that helpers sleep, wake and end.
#include "fsdp/detail/host/team.hpp"

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "fsdp/host.hpp"
#include "tests/catch.hpp"
#include "tests/conformance/values.hpp"

namespace {

namespace host = fsdp::host;
using fsdp::conformance::Failure;

constexpr std::array thread_counts{1, 2, 3, 5, 8, 16};

/// How often each part ran, and what lanes were used by two parts at a time or do not exist.
struct Ledger {
  std::vector<int> ran;                // plain: ThreadSanitizer looks on
  std::vector<std::atomic<int>> busy;  // by lane
  std::atomic<int> wrong{0};

  Ledger(std::size_t parts, int threads) : ran(parts), busy(static_cast<std::size_t>(threads)) {}
  void run(std::int64_t part, int lane) {
    if (lane < 0 || lane >= static_cast<int>(busy.size())) {
      ++wrong;
      return;
    }
    auto& mine = busy[static_cast<std::size_t>(lane)];
    if (mine.exchange(1, std::memory_order_relaxed) != 0) ++wrong;
    ++ran[static_cast<std::size_t>(part)];
    mine.store(0, std::memory_order_relaxed);
  }
};

/// Waits until `count` threads have come, or for a minute: parts that do this show that they run at a time.
void meet(std::atomic<int>& arrived, int count) {
  ++arrived;
  auto const end = std::chrono::steady_clock::now() + std::chrono::minutes{1};
  while (arrived.load() < count && std::chrono::steady_clock::now() < end) std::this_thread::yield();
}

}  // namespace

TEST_CASE("team: every part runs once, on a lane of its own", "[team]") {
  for (int const threads : thread_counts) {
    host::Stream stream{"parts", threads};
    CHECK(stream.threads() == threads);
    for (std::int64_t const parts : {0, 1, 2, 3, 7, 64, 1000}) {
      CAPTURE(threads, parts);
      Ledger ledger(static_cast<std::size_t>(parts), threads);
      stream.enqueue_parts(parts, [&ledger](std::int64_t part, int lane) { ledger.run(part, lane); });
      stream.synchronize();
      CHECK(ledger.wrong == 0);
      CHECK(ledger.ran == std::vector<int>(static_cast<std::size_t>(parts), 1));
    }
  }
}

TEST_CASE("team: parts run at a time", "[team]") {
  for (int const threads : {2, 5}) {
    host::Stream stream{"meet", threads};
    for (int job = 0; job < 3; ++job) {  // the helpers are awake, and later asleep
      std::atomic<int> arrived{0};
      stream.enqueue_parts(threads, [&arrived, threads](std::int64_t) { meet(arrived, threads); });
      stream.synchronize();
      CHECK(arrived == threads);
      if (job == 1) std::this_thread::sleep_for(std::chrono::milliseconds{5});
    }
  }
}

TEST_CASE("team: many small tasks follow each other, each after all parts of the one before", "[team]") {
  for (int const threads : {2, 3, 8}) {
    host::Stream stream{"chain", threads};
    constexpr std::size_t n = 40;
    std::vector<std::int64_t> values(n, 0), sums;
    sums.reserve(1000);
    int const jobs = fsdp::conformance::sanitized ? 300 : 1000;
    for (int job = 0; job < jobs; ++job) {
      stream.enqueue_parts(n, [&values](std::int64_t part) { ++values[static_cast<std::size_t>(part)]; });
      stream.enqueue([&] { sums.push_back(std::accumulate(values.begin(), values.end(), std::int64_t{0})); });
      // Helpers that yield, and helpers that sleep.
      if (job % 100 == 50) stream.enqueue([] { std::this_thread::sleep_for(std::chrono::milliseconds{2}); });
    }
    stream.synchronize();
    for (std::size_t job = 0; job < sums.size(); ++job) REQUIRE(sums[job] == static_cast<std::int64_t>((job + 1) * n));
    CHECK(sums.size() == static_cast<std::size_t>(jobs));
  }
}

TEST_CASE("team: what a part throws reaches the caller, whichever thread ran it", "[team]") {
  for (int const threads : {1, 2, 4}) {
    host::Team team("throws", threads);
    for (std::int64_t const thrower : {0, 17, 39}) {
      std::array<std::atomic<int>, 40> ran{};
      auto const job = [&](std::int64_t part) {
        ++ran[static_cast<std::size_t>(part)];
        if (part == thrower) throw Failure("part " + std::to_string(part));
      };
      CHECK_THROWS_WITH(team.run(40, job), "part " + std::to_string(thrower));
      for (auto const& times : ran) CHECK(times <= 1);
    }
    std::atomic<int> after{0};
    team.run(40, [&after](std::int64_t) { ++after; });
    CHECK(after == 40);
  }
}

TEST_CASE("team: a part that throws poisons its stream", "[team]") {
  host::Stream stream{"poisoned", 3};
  std::atomic<int> ran{0};
  stream.enqueue_parts(30, [](std::int64_t part) {
    if (part == 11) throw Failure("part 11");
  });
  CHECK_THROWS_WITH(stream.synchronize(), "part 11");
  CHECK_THROWS_AS(stream.enqueue_parts(2, [&ran](std::int64_t) { ++ran; }), Failure);
  CHECK(ran == 0);
}

TEST_CASE("team: misuse is refused", "[team]") {
  for (int const threads : {1, 3}) {
    host::Team team("nested", threads);
    std::atomic<int> refused{0};
    team.run(6, [&](std::int64_t) {
      try {
        team.run(2, [](std::int64_t) {});
      } catch (fsdp::UsageError const&) {
        ++refused;
      }
    });
    CHECK(refused == 6);
    CHECK_NOTHROW(team.run(2, [](std::int64_t) {}));
  }
  for (int const threads : {0, -1, host::Team::most_threads + 1}) {
    CHECK_THROWS_AS(host::Team("none", threads), fsdp::UsageError);
    CHECK_THROWS_AS(host::Stream("none", threads), fsdp::UsageError);
  }
  host::Stream stream{"moved", 2};
  CHECK_THROWS_AS(stream.enqueue_parts(-1, [](std::int64_t) {}), fsdp::UsageError);
  auto moved = std::move(stream);
  CHECK_THROWS_AS(stream.enqueue_parts(2, [](std::int64_t) {}), fsdp::UsageError);
  CHECK_THROWS_AS(stream.threads(), fsdp::UsageError);
  std::atomic<int> ran{0};
  moved.enqueue_parts(2, [&ran](std::int64_t) { ++ran; });
  moved.synchronize();
  CHECK(ran == 2);
}

TEST_CASE("team: streams without helpers, and the calling thread's, run the parts in order", "[team]") {
  std::vector<std::int64_t> order;
  auto const note = [&order](std::int64_t part, int lane) { order.push_back(10 * part + lane); };
  host::Stream alone{"alone"};
  alone.enqueue_parts(3, note);
  alone.synchronize();
  auto at_once = host::Stream::inline_stream("inline");
  at_once.enqueue_parts(3, note);
  CHECK(order == std::vector<std::int64_t>{0, 10, 20, 0, 10, 20});

  // Parts enqueue work of their own there, all at a time.
  host::Device const device;
  auto& own = host::Stream::of_calling_thread();
  host::Stream stream{"parts", 4};
  std::vector<std::int64_t> values(400, 0);
  stream.enqueue_parts(100, [&](std::int64_t part) {
    own.enqueue_parts(4, [&values, part](std::int64_t i) { values[static_cast<std::size_t>(4 * part + i)] = i; });
    if (part % 2 == 0) device.zero_async(own, values.data() + 4 * part, 2 * sizeof(std::int64_t));
  });
  stream.synchronize();
  for (std::size_t i = 0; i < values.size(); ++i)
    REQUIRE(values[i] == (i / 4 % 2 == 0 && i % 4 < 2 ? 0 : static_cast<std::int64_t>(i % 4)));
}

TEST_CASE("team: compute streams of a device have its threads, others one; copies come whole", "[team]") {
  host::Device const device{.threads = 3};
  CHECK(device.make_stream("compute").threads() == 3);
  CHECK(device.make_stream("compute", fsdp::StreamPriority::normal).threads() == 3);
  CHECK(device.make_stream("gather", fsdp::StreamPriority::high).threads() == 1);
  CHECK(host::Device{}.make_stream("compute").threads() == 1);

  auto stream = device.make_stream("copies");
  for (std::size_t const bytes : {std::size_t{1}, std::size_t{1} << 20, (std::size_t{5} << 20) + 3}) {
    std::vector<unsigned char> from(bytes + 1), to(bytes + 1, 7);
    for (std::size_t i = 0; i < bytes; ++i) from[i] = static_cast<unsigned char>(i * 31 + i / 255);
    device.copy_async(stream, to.data(), from.data(), bytes);
    device.synchronize(stream);
    CHECK(std::memcmp(to.data(), from.data(), bytes) == 0);
    CHECK(to.back() == 7);
    device.zero_async(stream, to.data(), bytes);
    device.synchronize(stream);
    CHECK(std::vector<unsigned char>(to.begin(), to.end() - 1) == std::vector<unsigned char>(bytes, 0));
    CHECK(to.back() == 7);
  }
}

TEST_CASE("team: parts keep subnormals, whatever modes the threads began with", "[team]") {
  if (fsdp::detail::arithmetic_modes == 0) return;  // a processor whose modes the library does not know
  auto const before = fsdp::detail::read_arithmetic();
  fsdp::detail::write_arithmetic(before | fsdp::detail::arithmetic_modes);  // as in a program linked with -Ofast
  std::atomic<int> arrived{0}, flushed{0};
  {
    host::Team team("modes", 3);
    team.run(3, [&](std::int64_t) {
      float volatile smallest_normal = 0x1p-126f;
      float volatile half = smallest_normal * 0.5f;
      if (half == 0.0f) ++flushed;
      meet(arrived, 3);  // so that every thread has a part
    });
  }
  fsdp::detail::write_arithmetic(before);
  CHECK(arrived == 3);
  CHECK(flushed == 0);
}
