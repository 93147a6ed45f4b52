// SPDX-License-Identifier: Apache-2.0
// The host device: the suite with worker threads, with teams of them, with inline streams and through a delaying
// wrapper; and what a host stream promises beyond the concept.
#include "fsdp/host.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "tests/conformance/device_suite.hpp"
#include "tests/support/in_child.hpp"

namespace {

namespace host = fsdp::host;
namespace conformance = fsdp::conformance;

struct Workers {
  using Device = host::Device;
  static Device device() { return {}; }
  static constexpr bool concurrent = true;
};
struct Teams {
  using Device = host::Device;
  static Device device() { return {.threads = 3}; }
  static constexpr bool concurrent = true;
};
struct Inline {
  using Device = fsdp::testing::InlineDevice<host::Device>;
  static Device device() { return {}; }
  static constexpr bool concurrent = false;
};
struct Delayed {
  using Device = fsdp::testing::DelayDevice<host::Device>;
  static Device device() { return {host::Device{}, 42, 20}; }
  static constexpr bool concurrent = true;
};

static_assert(fsdp::Device<fsdp::testing::DropDevice<host::Device>>);
static_assert(fsdp::Device<fsdp::testing::CountDevice<host::Device>>);

}  // namespace

FSDP_DEVICE_SUITE("host", Workers);
FSDP_DEVICE_SUITE("host, three threads a stream", Teams);
FSDP_DEVICE_SUITE("host, inline streams", Inline);
FSDP_DEVICE_SUITE("host, delayed", Delayed);

TEST_CASE("host: an inline stream passes exceptions to the caller", "[device]") {
  auto stream = host::Stream::inline_stream("inline");
  int ran = 0;
  CHECK_THROWS_AS(stream.enqueue([] { throw conformance::Failure("now"); }), conformance::Failure);
  stream.enqueue([&ran] { ++ran; });
  CHECK(ran == 1);
}

TEST_CASE("host: an inline stream blocks the caller in a wait", "[device]") {
  host::Stream worker{"worker"};
  auto stream = host::Stream::inline_stream("inline");
  host::Event event;
  int value = 0;
  worker.enqueue([&value] {
    std::this_thread::sleep_for(std::chrono::milliseconds{20});
    value = 7;
  });
  worker.record(event);
  stream.wait(event, fsdp::WaitSite::compute_unsharded);
  CHECK(value == 7);
  CHECK(stream.blocked_ns(fsdp::WaitSite::compute_unsharded) > 0);
  CHECK(stream.blocked_ns(fsdp::WaitSite::none) == 0);
}

TEST_CASE("host: blocked time is counted where it was spent", "[device]") {
  host::Stream slow{"slow"}, fast{"fast"};
  host::Event event;
  // A round counts nothing if `fast` comes to its wait when `slow` has ended.
  for (int round = 0; round < 1000 && fast.blocked_ns(fsdp::WaitSite::reduce_gradients) == 0; ++round) {
    slow.enqueue([] { std::this_thread::sleep_for(std::chrono::milliseconds{3}); });
    slow.record(event);
    fast.wait(event, fsdp::WaitSite::reduce_gradients);
    fast.synchronize();
  }
  CHECK(fast.blocked_ns(fsdp::WaitSite::reduce_gradients) > 0);
  CHECK(fast.blocked_ns(fsdp::WaitSite::gather_updated) == 0);
  CHECK(slow.blocked_ns(fsdp::WaitSite::reduce_gradients) == 0);
}

TEST_CASE("host: a task that synchronizes its own stream is told so", "[device]") {
  host::Stream stream{"self"};
  stream.enqueue([&stream] { stream.synchronize(); });
  CHECK_THROWS_AS(stream.synchronize(), fsdp::UsageError);
}

TEST_CASE("host: the destructor finishes the queue, and assignment finishes the old one", "[device]") {
  std::atomic<int> ran{0};
  auto const fill = [&ran](host::Stream& stream) {
    for (int i = 0; i < 100; ++i) stream.enqueue([&ran] { ++ran; });
  };
  {
    host::Stream stream{"first"};
    fill(stream);
    host::Stream other{"second"};
    fill(other);
    stream = std::move(other);
    fill(stream);
  }
  CHECK(ran == 300);
}

namespace {

/// Counts how many there are that were not moved from.
struct Canary {
  explicit Canary(std::atomic<int>* count) : alive(count) { ++*alive; }
  Canary(Canary&& other) noexcept : alive(std::exchange(other.alive, nullptr)) {}
  Canary(Canary const&) = delete;
  Canary& operator=(Canary const&) = delete;
  ~Canary() {
    if (alive != nullptr) --*alive;
  }
  void operator()() const {}
  std::atomic<int>* alive;
};
struct CanaryOfBytes : Canary {
  using Canary::Canary;
  static constexpr bool moves_as_bytes = true;
};

/// Stops a stream's worker until the end of its scope.
class Stop {
 public:
  explicit Stop(host::Stream& stream) {
    stream.enqueue([this] {
      begun_.store(true);
      while (!goes_on_.load()) std::this_thread::yield();
      ended_.store(true);
    });
    while (!begun_.load()) std::this_thread::yield();
  }
  Stop(Stop const&) = delete;
  ~Stop() {
    goes_on_.store(true);
    while (!ended_.load()) std::this_thread::yield();
  }

 private:
  std::atomic<bool> begun_{false}, goes_on_{false}, ended_{false};
};

template <class C>
int alive_in_the_next_task() {
  std::atomic<int> alive{0};
  int seen = -1;
  host::Stream stream{"canary"};
  stream.enqueue(C{&alive});
  stream.enqueue([&] { seen = alive; });
  stream.synchronize();
  return seen;
}
template <class C>
int alive_after_a_failure() {
  std::atomic<int> alive{0};
  {
    host::Stream stream{"skips"};
    Stop const stop(stream);
    stream.enqueue([] { throw fsdp::Error("the first"); });
    for (int i = 0; i < 3; ++i) stream.enqueue(C{&alive});
  }
  return alive;
}

int tasks_with_their_bytes = 0;  // of one stream's tasks at a time

/// Enqueues a task of so many bytes, which are looked at when it runs.
template <std::size_t Bytes>
void enqueue_bytes(host::Stream& stream, int value) {
  std::array<unsigned char, Bytes - 1> bytes;
  bytes.fill(static_cast<unsigned char>(value));
  stream.enqueue([bytes, last = static_cast<unsigned char>(value)] {
    for (auto const byte : bytes)
      if (byte != last) return;
    ++tasks_with_their_bytes;
  });
}

}  // namespace

TEST_CASE("host: a callable is destroyed before the next task runs", "[device]") {
  CHECK(alive_in_the_next_task<Canary>() == 0);
  CHECK(alive_in_the_next_task<CanaryOfBytes>() == 0);
  CHECK(alive_after_a_failure<Canary>() == 0);
  CHECK(alive_after_a_failure<CanaryOfBytes>() == 0);
}

TEST_CASE("host: tasks of any size come out as they went in, in order, however many wait", "[device]") {
  host::Stream stream{"sizes"};
  std::vector<int> order;
  for (int const backlog : {1, 30, 300, 3'000, 30, 3'000}) {
    tasks_with_their_bytes = 0;
    order.clear();
    {
      std::optional<Stop> stop(std::in_place, stream);
      for (int i = 0; i < backlog; ++i) {
        switch (i % 7) {
          case 0: enqueue_bytes<2>(stream, i); break;
          case 1: enqueue_bytes<8>(stream, i); break;
          case 2: enqueue_bytes<77>(stream, i); break;
          case 3: enqueue_bytes<500>(stream, i); break;
          case 4: enqueue_bytes<4'000>(stream, i); break;
          case 5: enqueue_bytes<4'080>(stream, i); break;  // the most
          case 6: enqueue_bytes<5'000>(stream, i); break;  // in memory of its own
        }
        stream.enqueue([&order, i] { order.push_back(i); });
        if (i == 1'000) stop.reset();  // from now on the queue is emptied while it is filled
      }
    }
    stream.synchronize();
    CHECK(tasks_with_their_bytes == backlog);
    REQUIRE(order.size() == static_cast<std::size_t>(backlog));
    for (int i = 0; i < backlog; ++i) REQUIRE(order[static_cast<std::size_t>(i)] == i);
  }
}

namespace {

/// Fills queues, which have taken some tasks before, to the last word.
template <std::size_t Bytes>
void fill_queues() {
  for (int before = 0; before < 12; ++before) {
    host::Stream stream{"full"};
    tasks_with_their_bytes = 0;
    for (int i = 0; i < before; ++i) enqueue_bytes<Bytes>(stream, i);
    {
      Stop const stop(stream);
      for (int i = 0; i < 1'000; ++i) enqueue_bytes<Bytes>(stream, i);
    }
    stream.synchronize();
    CHECK(tasks_with_their_bytes == before + 1'000);
  }
}

}  // namespace

TEST_CASE("host: a queue that is full to the last word keeps every task", "[device]") {
  fill_queues<8>();
  fill_queues<16>();
  fill_queues<24>();
  fill_queues<32>();
  fill_queues<64>();
}

namespace {

int calls_of_a_function = 0;
void a_function() { ++calls_of_a_function; }

/// Runs `enqueue(stream)` on a stream with a worker and on one without.
template <class Enqueue>
void on_both(Enqueue const& enqueue) {
  host::Stream worker{"worker"};
  enqueue(worker);
  worker.synchronize();
  auto at_once = host::Stream::inline_stream("inline");
  enqueue(at_once);
}

}  // namespace

TEST_CASE("host: a stream takes callables of any shape", "[device]") {
  int ran = 0;
  on_both([&](host::Stream& stream) { stream.enqueue([] { a_function(); }); });
  on_both([&](host::Stream& stream) { stream.enqueue(a_function); });
  on_both([&](host::Stream& stream) { stream.enqueue(&a_function); });
  CHECK(calls_of_a_function == 6);

  struct alignas(128) Wide {
    double values[64] = {};
  };
  Wide wide;
  wide.values[63] = 1.5;
  double sum = 0.0;
  bool aligned = true;
  on_both([&](host::Stream& stream) {
    stream.enqueue([wide, &sum, &aligned] {
      sum += wide.values[63];
      aligned = aligned && reinterpret_cast<std::uintptr_t>(&wide) % alignof(Wide) == 0;
    });
  });
  CHECK(sum == 3.0);
  CHECK(aligned);

  std::array<char, 100'000> large{};
  large.back() = 'x';
  on_both([&](host::Stream& stream) { stream.enqueue([large, &ran] { ran += large.back() == 'x' ? 1 : 0; }); });
  CHECK(ran == 2);

  on_both([&](host::Stream& stream) { stream.enqueue([owned = std::make_unique<int>(4), &ran] { ran += *owned; }); });
  CHECK(ran == 10);

  // A callable is copied: what it changes of itself is its own.
  int last = 0;
  auto counts = [count = 0, &last]() mutable { last = ++count; };
  for (int i = 0; i < 2; ++i)
    on_both([&](host::Stream& stream) {
      stream.enqueue(counts);
      CHECK((stream.synchronize(), last) == 1);
    });
}

TEST_CASE("host: a stream that was moved from says so", "[device]") {
  host::Stream stream{"moved"};
  auto const other = std::move(stream);
  CHECK_THROWS_AS(stream.enqueue([] {}), fsdp::UsageError);
  CHECK_THROWS_AS(stream.enqueue([p = std::make_unique<int>()] {}), fsdp::UsageError);
  CHECK_THROWS_AS(stream.synchronize(), fsdp::UsageError);
  CHECK_THROWS_AS(stream.name(), fsdp::UsageError);
  CHECK_THROWS_AS(stream.blocked_ns(fsdp::WaitSite::none), fsdp::UsageError);
  host::Event event;
  CHECK_THROWS_AS(stream.record(event), fsdp::UsageError);
}

TEST_CASE("host: a callable that is skipped is destroyed, and not called", "[device]") {
  auto const kept = std::make_shared<int>(0);
  int called = 0;
  {
    host::Stream stream{"skips"};
    stream.enqueue([] { throw fsdp::Error("the first"); });
    for (int i = 0; i < 3; ++i) {
      try {
        stream.enqueue([kept, &called] { ++called; });
        stream.enqueue([&called] { ++called; });
      } catch (fsdp::Error const&) {
      }
    }
  }
  CHECK(called == 0);
  CHECK(kept.use_count() == 1);
}

namespace {

using fsdp::testing::in_child;

/// A stream that waits for ever.
void wait_in_vain() {
  host::Stream busy{"busy"}, stuck{"stuck stream"};
  host::Event event;
  busy.enqueue([] { std::this_thread::sleep_for(std::chrono::hours{1}); });
  busy.record(event);
  stuck.wait(event, fsdp::WaitSite::gather_slot_read);
  std::this_thread::sleep_for(std::chrono::hours{1});
}

}  // namespace

TEST_CASE("host: a wait that misses its deadline is reported and ends the process", "[device][fork]") {
  auto const outcome = in_child([] {
    host::set_wait_deadline(std::chrono::milliseconds{50});
    wait_in_vain();
  });
  CHECK(outcome.code == host::wait_expired_exit_code);
  CHECK(outcome.text.find("stuck stream") != std::string::npos);
  CHECK(outcome.text.find("gather_slot_read") != std::string::npos);
  CHECK(outcome.text.find("since 2") != std::string::npos);
}

TEST_CASE("host: SIGTERM during a wait is reported and ends the process", "[device][fork]") {
  auto const outcome = in_child([] {
    host::report_on_sigterm();
    ::kill(::getpid(), SIGTERM);
    wait_in_vain();
  });
  CHECK(outcome.code == host::wait_terminated_exit_code);
  CHECK(outcome.text.find("gather_slot_read") != std::string::npos);
}

TEST_CASE("host: tasks keep subnormals, whatever the threads around them and tasks before them do", "[device]") {
  if (fsdp::detail::arithmetic_modes == 0) return;  // a processor whose modes the library does not know
  auto const flushes = [] {
    float volatile smallest_normal = 0x1p-126f;
    float volatile half = smallest_normal * 0.5f;  // here, not where the result is used
    return half == 0.0f;
  };
  auto const before = fsdp::detail::read_arithmetic();
  fsdp::detail::write_arithmetic(before | fsdp::detail::arithmetic_modes);  // toward zero, and subnormals are zero
  bool const caller = flushes();
  bool inline_task = true, worker_task = true, again = true;
  auto stream = host::Stream::inline_stream("inline");
  stream.enqueue([&] { inline_task = flushes(); });
  bool const caller_after = flushes();
  host::Stream worker("worker");
  worker.enqueue([&] { worker_task = flushes(); });
  worker.enqueue([flushing = before | fsdp::detail::arithmetic_modes] { fsdp::detail::write_arithmetic(flushing); });
  worker.enqueue([&] { again = flushes(); });
  worker.synchronize();
  fsdp::detail::write_arithmetic(before);
  CHECK(caller);
  CHECK_FALSE(inline_task);
  CHECK(caller_after);
  CHECK_FALSE(worker_task);
  CHECK_FALSE(again);
}

TEST_CASE("guarded memory reserves the addresses around it") {
  constexpr std::size_t guard = std::size_t{1} << 30;
  fsdp::host::GuardedMemory const memory(1000, guard);
  auto* const data = static_cast<std::byte*>(memory.data());
  auto const page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  auto const is_taken = [&](std::byte* address) {
    auto* const at = address - reinterpret_cast<std::uintptr_t>(address) % page;
    void* const got = ::mmap(at, page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (got == MAP_FAILED) return errno == EEXIST;
    ::munmap(got, page);
    return false;
  };
  for (std::size_t const distance : {std::size_t{1}, guard / 2, guard}) {
    CHECK(is_taken(data - distance));
    CHECK(is_taken(data + 1000 + distance));
  }
  CHECK(reinterpret_cast<std::uintptr_t>(data) % 256 == 0);
  CHECK(fsdp::host::GuardedMemory(0).data() == nullptr);
}
