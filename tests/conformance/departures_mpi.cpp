// SPDX-License-Identifier: Apache-2.0
// mpi::Communicator when ranks leave, fail or are moved from: peers learn of it at once, and destructors survive.
// ranks: 3
#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fsdp/mpi.hpp"
#include "tests/catch.hpp"
#include "tests/conformance/values.hpp"
#include "tests/mpi_main.hpp"

namespace {

using fsdp::conformance::expect_throws;
using fsdp::mpi::Communicator;

constexpr fsdp::Label label{"unit", "test"};

/// A wait that misses the deadline ends the run.
Communicator make_world(int ranks_per_node) {
  fsdp::mpi::Options options;
  options.timeout = std::chrono::hours(1);  // never reached, whatever stops this machine for a while
  options.ranks_per_node = ranks_per_node;
  return Communicator(test_environment(), {}, options);
}

bool contains(std::string const& text, std::string const& part) {
  INFO(text);
  INFO("lacks: " << part);
  CHECK(text.find(part) != std::string::npos);
  return text.find(part) != std::string::npos;
}

/// The call in which a staying rank waits.
enum class Wait { collective, exchange, split, allocate };

std::string wait_in(Wait wait, Communicator& comm, fsdp::host::Stream& stream) {
  double value = 1;
  return expect_throws<fsdp::PeerError>("a wait for a rank that has left", [&] {
    if (wait == Wait::collective) {
      comm.all_reduce(stream, static_cast<double const*>(&value), &value, 1, label);
      stream.synchronize();
    }
    if (wait == Wait::exchange) comm.exchange("text", "test");
    if (wait == Wait::split) static_cast<void>(comm.split(0, 0, "part"));
    if (wait == Wait::allocate) comm.allocate(100);
  });
}

}  // namespace

TEST_CASE("mpi: a rank that leaves early is named to whoever waits for it") {
  for (int const ranks_per_node : {0, 1, 2}) {
    for (auto const wait : {Wait::collective, Wait::exchange, Wait::split, Wait::allocate}) {
      auto world = make_world(ranks_per_node);
      auto part = world.split(0, world.rank(), "part");
      auto stream = part.device().make_stream("collectives", fsdp::StreamPriority::high);
      double value = 1;
      for (int i = 0; i < 3; ++i) part.all_reduce(stream, static_cast<double const*>(&value), &value, 1, label);
      int const last = world.size() - 1;
      if (world.rank() == last) {
        Communicator const gone(std::move(part));
      } else {
        auto const text = wait_in(wait, part, stream);
        contains(text, fmt::format("rank {} has left the group", last));
      }
      if (world.rank() == last || wait != Wait::collective) stream.synchronize();
      CHECK(value == world.size() * world.size() * world.size());  // what it had enqueued has run
    }
  }
}

TEST_CASE("mpi: a rank that leaves by an exception which is caught above is named, and ranks may go on") {
  for (int const ranks_per_node : {0, 1}) {
    auto world = make_world(ranks_per_node);
    int const last = world.size() - 1;
    auto stream = world.device().make_stream("collectives", fsdp::StreamPriority::high);
    std::string text;
    try {
      auto part = world.split(0, world.rank(), "part");
      if (world.rank() == last) throw std::runtime_error("enough");
      text = wait_in(Wait::collective, part, stream);
    } catch (std::runtime_error const& error) {
      CHECK(std::string(error.what()) == "enough");
    }
    if (world.rank() != last) contains(text, fmt::format("rank {} has left the group after an exception", last));
    // They have made different calls, and go on all the same.
    for (int i = 0; i < 3; ++i) CHECK(world.exchange({}, "recovered").size() == static_cast<std::size_t>(world.size()));
    auto again = world.split(0, world.rank(), "again");
    auto fresh = world.device().make_stream("collectives", fsdp::StreamPriority::high);
    double value = 1;
    again.all_reduce(fresh, static_cast<double const*>(&value), &value, 1, label);
    fresh.synchronize();
    CHECK(value == world.size());
  }
}

TEST_CASE("mpi: a rank whose stream has failed is named, though it lives on") {
  for (int const ranks_per_node : {0, 1}) {
    auto world = make_world(ranks_per_node);
    auto part = world.split(0, world.rank(), "part");
    auto stream = part.device().make_stream("collectives", fsdp::StreamPriority::high);
    double value = 1;
    int const last = world.size() - 1;
    if (world.rank() == last) stream.enqueue([] { throw std::runtime_error("a task fails"); });
    auto const run = [&] {
      part.all_reduce(stream, static_cast<double const*>(&value), &value, 1, label);
      stream.synchronize();
    };
    if (world.rank() == last) {
      expect_throws<std::runtime_error>("a stream that has failed", run);
    } else {
      contains(expect_throws<fsdp::PeerError>("a collective without that rank", run),
               fmt::format("rank {} failed: a task fails", last));
    }
    world.exchange({}, "all have seen it");
  }
}

// A rank can fail in collective 2 while a peer is still in 1: both have what 1 needs of them, the peer has not looked.
// Here the news comes first, by hand.
TEST_CASE("mpi: a failure in a collective leaves those before it to peers that are still in them") {
  using fsdp::mpi::detail::Collectives;
  for (int const ranks_per_node : {0, 1, 2}) {
    auto const& environment = test_environment();
    auto const id = 4711u + static_cast<unsigned>(ranks_per_node);  // nobody else's
    auto state = std::make_shared<fsdp::mpi::detail::WorldState>(environment.mail(), id, environment.rank());
    MPI_Comm world = MPI_COMM_NULL;
    MPI_Comm_dup(MPI_COMM_WORLD, &world);
    fsdp::mpi::Options options;
    options.ranks_per_node = ranks_per_node;
    fsdp::mpi::detail::Group group(world, environment.nodes(ranks_per_node), state, id + 100, "world", {}, options);
    Collectives collectives(group);
    int const last = group.size() - 1;
    double value = 1;
    auto const all_reduce = [&](std::uint64_t sequence) {
      fsdp::mpi::detail::Call call;
      call.header.sequence = sequence;
      call.header.count = 1;
      call.header.collective = fsdp::comm::Collective::all_reduce;
      call.header.type = fsdp::DType::f64;
      call.send = call.receive = reinterpret_cast<std::byte*>(&value);
      collectives.run(call);
    };
    if (group.rank() == last) {
      group.fail_all({fsdp::ErrorKind::other, "it fails in collective 2"}, 2);
      std::this_thread::sleep_for(std::chrono::milliseconds(50));  // peers wait for this rank, and hear of it
    }
    all_reduce(1);
    CHECK(value == group.size());
    contains(expect_throws<fsdp::PeerError>("a collective that a peer fails in", [&] { all_reduce(2); }),
             fmt::format("rank {} failed: it fails in collective 2", last));
    CHECK_NOTHROW(group.exchange({}, "all have seen it"));
    group.fail_all({fsdp::ErrorKind::other, "another fails in 1"}, 1);
    CHECK_THROWS_AS(group.throw_if_failed(1), fsdp::PeerError);
  }
}

TEST_CASE("mpi: collectives that are queued when their communicator dies are run") {
  for (int const ranks_per_node : {0, 1}) {
    auto world = make_world(ranks_per_node);
    constexpr std::size_t count = 5000;
    std::vector<float> values(count, 1.0f);
    auto stream = world.device().make_stream("collectives", fsdp::StreamPriority::high);
    {
      auto part = world.split(0, world.rank(), "part");
      for (int i = 0; i < 20; ++i) {
        auto const ticket =
            part.all_reduce(stream, static_cast<float const*>(values.data()), values.data(), count, label);
        part.wait_for_peers(stream, ticket, fsdp::WaitSite::none);
        stream.enqueue([&] {
          for (auto& value : values) value /= static_cast<float>(world.size());
        });
      }
    }
    stream.synchronize();
    CHECK(values == std::vector<float>(count, 1.0f));
  }
}

TEST_CASE("mpi: a communicator that was moved from says so, and can be destroyed and assigned to") {
  auto world = make_world(0);
  auto stream = world.device().make_stream("collectives", fsdp::StreamPriority::high);
  auto part = world.split(0, world.rank(), "part");
  Communicator moved(std::move(part));
  double value = 1;
  auto const refused = [&](auto const& call) {
    contains(expect_throws<fsdp::UsageError>("a call of a communicator that was moved from", call), "moved from");
  };
  refused([&] { static_cast<void>(part.rank()); });
  refused([&] { static_cast<void>(part.size()); });
  refused([&] { static_cast<void>(part.split(0, 0, "again")); });
  refused([&] { part.allocate(8); });
  refused([&] { part.exchange({}, "test"); });
  refused([&] { part.all_reduce(stream, static_cast<double const*>(&value), &value, 1, label); });
  refused([&] { part.broadcast(stream, &value, 1, 0, label); });
  refused([&] { part.wait_for_peers(stream, {}, fsdp::WaitSite::none); });
  part.deallocate(nullptr, 0);
  auto& same = moved;
  moved = std::move(same);
  CHECK(moved.exchange({}, "after itself").size() == 3);
  part = std::move(moved);
  CHECK(part.exchange({}, "moved back").size() == 3);
  Communicator empty(std::move(part));
  auto& nothing = part;
  part = std::move(nothing);  // nothing to nothing
  moved = std::move(part);    // nothing over nothing
  empty = std::move(moved);   // nothing over something: it leaves
  expect_throws<fsdp::UsageError>("a call after that", [&] { static_cast<void>(empty.rank()); });
  world.exchange({}, "done");
}
