// SPDX-License-Identifier: Apache-2.0
// local::Communicator over several devices: each is told of all others before anything moves, and a pair that cannot
// read each other's memory ends the run by name. What a failed run leaves is freed when all devices are idle.
// skip-tsan
#include <algorithm>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/host.hpp"
#include "fsdp/local.hpp"
#include "tests/catch.hpp"
#include "tests/conformance/values.hpp"
#include "tests/support/messages.hpp"

namespace {

/// A host device with a number that has to be told of others before it may read their memory.
struct Device : fsdp::host::Device {
  struct Pairs {
    std::mutex mutex;
    std::vector<std::pair<int, int>> told;  // reader, owner
    std::vector<int> ended;                 // devices whose work was awaited, and -1 for memory that was freed
  };

  void enable_peer_access(Device const& peer) const {
    if (number == apart.first && peer.number == apart.second)
      fsdp::fail<fsdp::ConfigError>("device {} cannot read device {}", number, peer.number);
    std::lock_guard const lock(pairs->mutex);
    pairs->told.emplace_back(number, peer.number);
  }

  void synchronize_all() const noexcept { note(number); }
  void deallocate(void* memory, std::size_t bytes) const noexcept {
    note(-1);
    fsdp::host::Device::deallocate(memory, bytes);
  }
  void note(int what) const noexcept {
    std::lock_guard const lock(pairs->mutex);
    pairs->ended.push_back(what);
  }

  Pairs* pairs = nullptr;
  int number = 0;
  std::pair<int, int> apart{-1, -1};  // a device, and one that it cannot read
};
using Comm = fsdp::local::Communicator<Device>;

}  // namespace

TEST_CASE("local: each rank's device is told of every peer's, before the rank's body runs", "[communicator]") {
  Device::Pairs pairs;
  fsdp::local::run(
      3,
      [&](int rank) {
        return Device{{}, &pairs, 10 + rank};
      },
      [&](Comm comm) {
        std::vector<int> told;
        {
          std::lock_guard const lock(pairs.mutex);
          for (auto const& [reader, owner] : pairs.told)
            if (reader == comm.device().number) told.push_back(owner);
        }
        std::sort(told.begin(), told.end());
        std::vector<int> peers;
        for (int rank = 0; rank < 3; ++rank)
          if (rank != comm.rank()) peers.push_back(10 + rank);
        if (told != peers) throw fsdp::Error("a device was not told of all others");
        auto part = comm.split(0, comm.rank(), "part");  // of the same devices: nothing is new
        static_cast<void>(part.exchange({}, "test"));
      });
  CHECK(pairs.told.size() == 6);
}

TEST_CASE("local: devices that cannot read each other's memory end the run by name", "[communicator]") {
  Device::Pairs pairs;
  bool began = false;
  auto const run = [&] {
    fsdp::local::run(
        3,
        [&](int rank) {
          return Device{{}, &pairs, rank, {2, 0}};
        },
        [&](Comm comm) {
          if (comm.rank() == 2) began = true;
          static_cast<void>(comm.exchange({}, "test"));
        });
  };
  CHECK_THROWS_AS(run(), fsdp::ConfigError);
  CHECK(fsdp::testing::what(run) == "device 2 cannot read device 0");
  CHECK_FALSE(began);
}

TEST_CASE("local: memory of a run that fails is freed when all devices are idle, wherever it lies", "[communicator]") {
  Device::Pairs pairs;
  auto const run = [&] {
    fsdp::local::run(
        3,
        [&](int rank) {
          return Device{{}, &pairs, rank};
        },
        [&](Comm comm) {
          if (comm.rank() == 1) throw fsdp::Error("enough");
          fsdp::conformance::Buffer<float, Comm> const buffer(comm, 16);
          static_cast<void>(comm.exchange({}, "test"));
        });
  };
  CHECK(fsdp::testing::what(run) == "enough");
  REQUIRE(pairs.ended.size() == 5);
  std::sort(pairs.ended.begin(), pairs.ended.begin() + 3);
  CHECK(pairs.ended == std::vector<int>{0, 1, 2, -1, -1});
}
