// SPDX-License-Identifier: Apache-2.0
// local::Communicator when ranks fail, leave or are moved from: peers learn of it at once, and destructors survive.
#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fsdp/host.hpp"
#include "fsdp/local.hpp"
#include "tests/catch.hpp"
#include "tests/conformance/values.hpp"
#include "tests/support/in_child.hpp"

namespace {

using fsdp::conformance::expect;
using fsdp::conformance::expect_throws;
using fsdp::conformance::Failure;

/// A host device whose copies fail while a thread wants them to.
struct Device : fsdp::host::Device {
  static bool& copies_fail() {
    static thread_local bool fail = false;
    return fail;
  }
  void copy_async(Stream& stream, void* to, void const* from, std::size_t bytes) const {
    if (copies_fail()) throw Failure("a copy that this device refuses");
    fsdp::host::Device::copy_async(stream, to, from, bytes);
  }
};
using Comm = fsdp::local::Communicator<Device>;
constexpr fsdp::Label label{"unit", "test"};

/// A wait that misses the deadline ends this program.
struct Deadline {
  Deadline() { fsdp::host::set_wait_deadline(std::chrono::seconds(60)); }
} const deadline;

void wait_for(std::atomic<bool> const& flag) {
  while (!flag.load()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace

TEST_CASE("local: a rank whose stream has failed names the reason to its peers, though it lives on", "[communicator]") {
  std::atomic<bool> told{false};
  fsdp::local::run(3, Device{}, [&](Comm comm) {
    auto stream = comm.device().make_stream("collectives", fsdp::StreamPriority::high);
    float value = 1;
    auto const reduce = [&] { comm.all_reduce(stream, static_cast<float const*>(&value), &value, 1, label); };
    if (comm.rank() == 1) {
      stream.enqueue([] { throw Failure("a task of rank 1"); });
      expect_throws<Failure>("synchronize", [&] { stream.synchronize(); });
      expect_throws<Failure>("a collective on a failed stream", reduce);
      wait_for(told);
      return;
    }
    auto const text = expect_throws<fsdp::PeerError>("a collective without rank 1", reduce);
    expect(text.find("rank 1 failed: a task of rank 1") != std::string::npos, "no reason: {}", text);
    if (comm.rank() == 0) told = true;
  });
}

TEST_CASE("local: a rank that leaves by an exception which is caught above is named, and ranks may go on",
          "[communicator]") {
  fsdp::local::run(3, Device{}, [&](Comm comm) {
    std::string text;
    try {
      auto part = comm.split(0, comm.rank(), "part");
      auto stream = comm.device().make_stream("collectives", fsdp::StreamPriority::high);
      float value = 1;
      if (comm.rank() == 2) throw Failure("enough");
      text = expect_throws<fsdp::PeerError>("a collective without rank 2", [&] {
        part.all_reduce(stream, static_cast<float const*>(&value), &value, 1, label);
      });
    } catch (Failure const& error) {
      expect(std::string(error.what()) == "enough", "another failure: {}", error.what());
    }
    // Ranks that wait already for the others see them wait for the rank that has left: that is no circle.
    for (int i = 0; i < 3; ++i) comm.exchange({}, "recovered");
    bool const named = text.find("rank 2 has left the group after an exception") != std::string::npos ||
                       text.find("failed: rank") != std::string::npos;  // told by the other one that waited
    expect(comm.rank() == 2 || named, "rank {}: {}", comm.rank(), text);
    auto again = comm.split(0, comm.rank(), "again");
    auto fresh = comm.device().make_stream("collectives", fsdp::StreamPriority::high);
    float value = 1;
    auto const ticket = again.all_reduce(fresh, static_cast<float const*>(&value), &value, 1, label);
    again.wait_for_peers(fresh, ticket, fsdp::WaitSite::none);  // they copy their results from here
    fresh.synchronize();
    expect(value == 3.0f, "the sum is {}", value);
  });
}

TEST_CASE("local: memory is given back though a peer fails inside a collective that reads it", "[communicator]") {
  std::atomic<bool> freed{false};
  fsdp::local::run(2, Device{}, [&](Comm comm) {
    auto stream = comm.device().make_stream("collectives", fsdp::StreamPriority::high);
    constexpr std::size_t count = 1000;
    auto* const memory = static_cast<float*>(comm.allocate(2 * count * sizeof(float)));
    auto* const own = memory + static_cast<std::size_t>(comm.rank()) * count;
    std::fill_n(own, count, 1.0f);
    auto const gather = [&] { comm.all_gather(stream, static_cast<float const*>(own), memory, count, label); };
    if (comm.rank() == 1) {
      Device::copies_fail() = true;
      expect_throws<Failure>("a collective whose copies fail", gather);
      wait_for(freed);
    } else {
      gather();
      comm.deallocate(memory, 2 * count * sizeof(float));
      freed = true;
      return;
    }
    comm.deallocate(memory, 2 * count * sizeof(float));
  });
}

TEST_CASE("local: a communicator that was moved from says so, and can be destroyed and assigned to", "[communicator]") {
  fsdp::local::run(2, Device{}, [&](Comm comm) {
    auto stream = comm.device().make_stream("collectives", fsdp::StreamPriority::high);
    auto part = comm.split(0, comm.rank(), "part");
    Comm moved(std::move(part));
    float value = 1;
    auto const refused = [&](auto const& call) {
      auto const text = expect_throws<fsdp::UsageError>("a call of a communicator that was moved from", call);
      expect(text.find("moved from") != std::string::npos, "another reason: {}", text);
    };
    refused([&] { static_cast<void>(part.rank()); });
    refused([&] { static_cast<void>(part.size()); });
    refused([&] { static_cast<void>(part.device()); });
    refused([&] { static_cast<void>(part.split(0, 0, "again")); });
    refused([&] { static_cast<void>(part.allocate(8)); });
    refused([&] { static_cast<void>(part.exchange({}, "test")); });
    refused([&] { part.all_reduce(stream, static_cast<float const*>(&value), &value, 1, label); });
    refused([&] { part.wait_for_peers(stream, {}, fsdp::WaitSite::none); });
    part.deallocate(nullptr, 0);
    auto& same = moved;
    moved = std::move(same);
    expect(moved.exchange({}, "after itself").size() == 2, "a communicator moved to itself");
    part = std::move(moved);
    expect(part.exchange({}, "moved back").size() == 2, "a communicator that came back");
    Comm empty(std::move(part));
    auto& nothing = part;
    part = std::move(nothing);  // nothing to nothing
    moved = std::move(part);    // nothing over nothing
    empty = std::move(moved);   // nothing over something: it leaves
    expect_throws<fsdp::UsageError>("a call after that", [&] { static_cast<void>(empty.rank()); });
    comm.exchange({}, "done");
  });
}

TEST_CASE("local: a wait that misses its deadline names the collective, the unit and the rank that does not come",
          "[communicator][fork]") {
  auto const outcome = fsdp::testing::in_child([] {
    fsdp::host::set_wait_deadline(std::chrono::milliseconds(300));
    fsdp::local::run(2, Device{}, [&](Comm comm) {
      auto stream = comm.device().make_stream("collectives", fsdp::StreamPriority::high);
      float values[3] = {1, 2, 3};
      comm.broadcast(stream, values, 1, 0, label);
      if (comm.rank() == 1) std::this_thread::sleep_for(std::chrono::minutes(5));
      comm.broadcast(stream, values, 3, 1, label);
    });
  });
  INFO(outcome.text);
  CHECK(outcome.code == fsdp::host::wait_expired_exit_code);
  for (auto const* part :
       {"rank 0: waits for rank 1 in broadcast 2 of 3 fp32 from rank 1 for unit 'unit' (test) on 'world'; waiting for ",
        " s, since 2"})
    CHECK(outcome.text.find(part) != std::string::npos);
}
