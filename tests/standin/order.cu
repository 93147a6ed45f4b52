// SPDX-License-Identifier: Apache-2.0
// Order of work in the stand-in for the CUDA runtime: under ThreadSanitizer two accesses without an order between them
// are reported in every run, whichever ran first; without it a stream that may go on does.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "fsdp/cuda.hpp"
#include "tests/catch.hpp"
#include "tests/standin/races.hpp"
#include "tests/standin/runtime/runtime.hpp"

namespace {

using fsdp::cuda::Device;
using fsdp::cuda::Stream;

struct Store {
  static constexpr int threads = 32;
  template <class Block>
  void operator()(Block const& block, std::int64_t, std::int64_t* to, std::int64_t value) const {
    if (block.thread() == 0) *to = value;
  }
};
struct Add {
  static constexpr int threads = 32;
  template <class Block>
  void operator()(Block const& block, std::int64_t, std::int64_t const* from, std::int64_t* to) const {
    if (block.thread() == 0) *to = *from + 1;
  }
};

/// Keeps a stream from going on until it is opened. Orders nothing.
class Gate {
 public:
  explicit Gate(Stream const& stream) {
    static_cast<void>(
        standin::enqueue(stream.get(), "a gate", [this] { return open_.load(std::memory_order_relaxed); }));
  }
  void open() { open_.store(true, std::memory_order_relaxed); }

 private:
  std::atomic<bool> open_{false};
};

/// Two streams, and memory that both know.
struct Two {
  Device device;
  Stream first = device.make_stream("first"), second = device.make_stream("second");
  std::int64_t* const shared = static_cast<std::int64_t*>(device.allocate(2 * sizeof(std::int64_t)));
  std::int64_t* const other = shared + 1;
  std::int64_t* const pinned = static_cast<std::int64_t*>(device.allocate_pinned(sizeof(std::int64_t)));

  Two() {
    device.zero_async(first, shared, 2 * sizeof(std::int64_t));
    device.synchronize(first);
    *pinned = 0;
  }
  Two(Two const&) = delete;
  Two& operator=(Two const&) = delete;
  ~Two() {
    device.synchronize(first);
    device.synchronize(second);
    device.deallocate(shared, 0);
    device.deallocate_pinned(pinned);
  }
  void store(Stream& stream, std::int64_t value = 1) { device.launch(stream, 1, Store{}, shared, value); }
  void load(Stream& stream) { device.launch(stream, 1, Add{}, static_cast<std::int64_t const*>(shared), other); }
  void order(Stream& before, Stream& after) {
    auto event = device.make_event();
    device.record(event, before);
    device.wait(after, event);
  }
  std::int64_t value_of(std::int64_t const* memory) {
    std::int64_t value = 0;
    device.copy_async(second, &value, memory, sizeof value);
    return value;
  }
};

}  // namespace

TEST_CASE("an event's wait holds a stream back, and nothing else does", "[standin]") {
  for (bool const wait : {true, false}) {
    Two two;
    Gate gate(two.first);
    two.store(two.first);
    if (wait) two.order(two.first, two.second);
    if (wait) {
      std::thread([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds{20});
        gate.open();
      }).detach();
      two.load(two.second);
      CHECK(two.value_of(two.other) == 2);
    } else {
      two.load(two.second);
      CHECK(two.value_of(two.other) == 1);  // while `first` stands at its gate
      gate.open();
    }
    two.device.synchronize(two.first);
  }
}

TEST_CASE("pinned memory is read when the stream comes to the copy, pageable memory during the call", "[standin]") {
  Two two;
  std::int64_t pageable = 1;
  *two.pinned = 1;
  Gate gate(two.first);
  two.device.copy_async(two.first, two.shared, two.pinned, sizeof(std::int64_t));
  two.device.copy_async(two.first, two.other, &pageable, sizeof(std::int64_t));
  *two.pinned = pageable = 2;
  gate.open();
  two.device.synchronize(two.first);
  CHECK(two.value_of(two.shared) == 2);
  CHECK(two.value_of(two.other) == 1);
}

#if defined(__SANITIZE_THREAD__)

namespace {

/// Waits for a stream without a word to ThreadSanitizer: a flag that the stream sets, which orders nothing.
void let_run(Stream const& stream) {
  std::atomic<bool> reached{false};
  static_cast<void>(standin::enqueue(stream.get(), "a flag", [&reached] {
    reached.store(true, std::memory_order_relaxed);
    return true;
  }));
  while (!reached.load(std::memory_order_relaxed)) std::this_thread::sleep_for(std::chrono::microseconds{100});
}

/// Races that `action` has, in a Two of its own.
template <class Action>
int races_of(Action const& action) {
  return standin::test::races_during([&] {
    Two two;
    action(two);
    two.device.synchronize(two.first);
    two.device.synchronize(two.second);
  });
}

/// Repeats a case with each of the streams held until the other is done.
template <class Action>
std::vector<int> races_in_both_orders(Action const& action) {
  std::vector<int> found;
  for (bool const first_is_late : {false, true}) {
    found.push_back(races_of([&](Two& two) {
      Gate gate(first_is_late ? two.first : two.second);
      action(two);
      let_run(first_is_late ? two.second : two.first);
      gate.open();
    }));
  }
  return found;
}
bool all_positive(std::vector<int> const& found) { return found[0] > 0 && found[1] > 0; }

}  // namespace

TEST_CASE("a write and a read on two streams race, whichever comes first", "[standin]") {
  CHECK(all_positive(races_in_both_orders([](Two& two) {
    two.store(two.first);
    two.load(two.second);
  })));
}
TEST_CASE("a read and a later write on two streams race, whichever comes first", "[standin]") {
  CHECK(all_positive(races_in_both_orders([](Two& two) {
    two.load(two.first);
    two.store(two.second);
  })));
}
TEST_CASE("copies race as kernels do", "[standin]") {
  CHECK(all_positive(races_in_both_orders([](Two& two) {
    two.device.copy_async(two.first, two.shared, two.pinned, sizeof(std::int64_t));
    two.device.zero_async(two.second, two.shared, sizeof(std::int64_t));
  })));
}
TEST_CASE("an event orders two streams, in one direction", "[standin]") {
  CHECK(races_of([](Two& two) {
          two.store(two.first);
          two.order(two.first, two.second);
          two.load(two.second);
        }) == 0);
  CHECK(races_of([](Two& two) {
          two.load(two.first);
          two.order(two.first, two.second);
          two.store(two.second);
        }) == 0);
  CHECK(races_of([](Two& two) {
          two.store(two.first);
          two.order(two.second, two.first);
          two.load(two.second);
        }) > 0);
  CHECK(races_of([](Two& two) {
          two.order(two.first, two.second);  // recorded before the write
          two.store(two.first);
          two.load(two.second);
        }) > 0);
}
TEST_CASE("one stream races with itself never, and streams in turn with events neither", "[standin]") {
  CHECK(races_of([](Two& two) {
          for (int i = 0; i < 50; ++i) {
            auto& stream = i % 2 == 0 ? two.first : two.second;
            two.store(stream, i);
            two.load(stream);
            two.order(stream, i % 2 == 0 ? two.second : two.first);
          }
        }) == 0);
}
TEST_CASE("the host races with streams that it did not wait for", "[standin]") {
  auto const copy_out = [](Two& two) {
    two.device.copy_async(two.first, two.pinned, two.shared, sizeof(std::int64_t));
  };
  auto const read = [](Two& two) {
    std::int64_t volatile const seen = *two.pinned;
    static_cast<void>(seen);
  };
  CHECK(races_of([&](Two& two) {
          copy_out(two);
          let_run(two.first);
          read(two);
        }) > 0);
  CHECK(races_of([&](Two& two) {
          copy_out(two);
          two.device.synchronize(two.first);
          read(two);
        }) == 0);
  CHECK(races_of([&](Two& two) {
          copy_out(two);
          auto event = two.device.make_event();
          two.device.record(event, two.first);
          two.device.synchronize(event);
          read(two);
        }) == 0);
  CHECK(races_of([&](Two& two) {
          copy_out(two);
          auto event = two.device.make_event();
          two.device.record(event, two.first);
          while (!two.device.is_done(event)) std::this_thread::yield();
          read(two);
        }) == 0);
  CHECK(races_of([&](Two& two) {
          copy_out(two);
          two.device.synchronize(two.second);
          let_run(two.first);
          read(two);
        }) > 0);
}
TEST_CASE("the host may not write pinned memory that a copy has yet to read", "[standin]") {
  CHECK(races_of([](Two& two) {
          two.device.copy_async(two.first, two.shared, two.pinned, sizeof(std::int64_t));
          let_run(two.first);
          *two.pinned = 2;
        }) > 0);
  CHECK(races_of([](Two& two) {
          *two.pinned = 2;
          two.device.copy_async(two.first, two.shared, two.pinned, sizeof(std::int64_t));
        }) == 0);
}
TEST_CASE("calls of CUDA's order no two threads of the host", "[standin]") {
  CHECK(races_of([](Two& two) {
          std::int64_t unguarded = 0;
          std::atomic<bool> written{false};
          std::thread writer([&] {
            unguarded = 1;
            two.store(two.second);
            written.store(true, std::memory_order_relaxed);
          });
          while (!written.load(std::memory_order_relaxed)) std::this_thread::yield();
          two.device.zero_async(two.first, two.other, sizeof(std::int64_t));
          std::int64_t volatile const seen = unguarded;
          static_cast<void>(seen);
          writer.join();
        }) > 0);
}

#endif
