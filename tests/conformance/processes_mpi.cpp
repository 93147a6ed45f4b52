// SPDX-License-Identifier: Apache-2.0
// Guarantees of mpi::Communicator beyond the suite: shared memory, errors that reach all ranks, results that are free.
// ranks: 3
// full-ranks: 2 4
// sanitizer-ranks: 3
#include <fmt/format.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "fsdp/detail/mpi/shared_arena.hpp"
#include "fsdp/mpi.hpp"
#include "tests/catch.hpp"
#include "tests/mpi_main.hpp"
#include "tests/support/devices.hpp"

namespace {

using fsdp::Label;
using fsdp::WaitSite;
using fsdp::mpi::Communicator;

constexpr Label label{"unit", "test"};

Communicator make_world(int ranks_per_node) {
  fsdp::mpi::Options options;
  options.ranks_per_node = ranks_per_node;
  return Communicator(test_environment(), {}, options);
}

std::size_t index(int rank) { return static_cast<std::size_t>(rank); }

/// The text of the E that `action` throws.
template <class E, class Action>
std::string thrown(Action&& action) {
  try {
    action();
  } catch (E const& error) {
    return error.what();
  }
  return "nothing was thrown";
}

/// Files of shared memory, and sockets that hand them over, that this process has open.
int open_files() {
  int count = 0;
  std::error_code gone;
  for (auto const& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    auto const target = std::filesystem::read_symlink(entry, gone).string();
    int domain = 0, type = 0;
    socklen_t bytes = sizeof(int);
    int const file = std::stoi(entry.path().filename());
    bool const posts = ::getsockopt(file, SOL_SOCKET, SO_DOMAIN, &domain, &bytes) == 0 && domain == AF_UNIX &&
                       ::getsockopt(file, SOL_SOCKET, SO_TYPE, &type, &bytes) == 0 && type == SOCK_DGRAM;
    if (posts || target.starts_with(fsdp::mpi::detail::shared_directory() + "/#") || target.starts_with("/memfd:fsdp"))
      ++count;
  }
  return count;
}

/// float i of rank r.
float value(int rank, std::size_t i) { return static_cast<float>(static_cast<int>(i % 61) + 100 * rank); }

}  // namespace

TEST_CASE("memory is shared from the first byte to the last, and no file stays open") {
  auto const open_before = open_files();
  auto world = make_world(0);
  constexpr std::size_t bytes = 70001;
  auto* const memory = static_cast<unsigned char*>(world.allocate(bytes));
  REQUIRE(memory != nullptr);
  CHECK(reinterpret_cast<std::uintptr_t>(memory) % 4096 == 0);
  CHECK(std::all_of(memory, memory + bytes, [](unsigned char byte) { return byte == 0; }));
  CHECK(open_files() == open_before);
  memory[0] = memory[bytes - 1] = 1;
  world.deallocate(memory, bytes);
}

TEST_CASE("a file is taken from the sender that was expected; what strangers send is closed") {
  using namespace fsdp::mpi::detail;
  auto const open_before = open_files();
  {
    DescriptorSocket expected, stranger, receiver;
    for (auto* socket : {&expected, &stranger, &receiver}) REQUIRE(socket->open() == 0);
    SharedFile theirs, file, received;
    REQUIRE(theirs.create() == 0);
    REQUIRE(file.create() == 0);
    REQUIRE(file.reserve(0, 4096) == 0);  // tells the two apart
    CHECK(open_files() == open_before + 5);
    CHECK(received.receive(receiver, expected.name()) == EAGAIN);
    REQUIRE(stranger.send(theirs.descriptor(), receiver.name()) == 0);
    CHECK(received.receive(receiver, expected.name()) == EAGAIN);
    REQUIRE(stranger.send(theirs.descriptor(), receiver.name()) == 0);
    REQUIRE(expected.send(file.descriptor(), receiver.name()) == 0);
    REQUIRE(received.receive(receiver, expected.name()) == 0);
    CHECK(open_files() == open_before + 6);
    CHECK(::lseek(received.descriptor(), 0, SEEK_END) == 4096);
  }
  CHECK(open_files() == open_before);
}

TEST_CASE("ranks may pass different offsets of shared memory") {
  for (int const ranks_per_node : {0, 1}) {
    auto world = make_world(ranks_per_node);
    auto stream = world.device().make_stream("gather", fsdp::StreamPriority::high);
    constexpr std::size_t count = 5003;
    auto const ranks = index(world.size());
    std::size_t const bytes = (ranks + 2) * count * sizeof(float) + 64 * ranks;
    auto* const memory = static_cast<float*>(world.allocate(bytes));
    auto* const send = memory + 3 * index(world.rank());
    auto* const receive = send + count + index(world.size() - world.rank());
    for (std::size_t i = 0; i < count; ++i) send[i] = value(world.rank(), i);
    auto const ticket = world.all_gather(stream, send, receive, count, label);
    world.wait_for_peers(stream, ticket, WaitSite::none);
    stream.synchronize();
    bool same = true;
    for (int rank = 0; rank < world.size(); ++rank)
      for (std::size_t i = 0; i < count; ++i) same = same && receive[index(rank) * count + i] == value(rank, i);
    CHECK(same);
    world.deallocate(memory, bytes);
  }
}

TEST_CASE("memory of a part of the ranks works in a collective of all") {
  auto world = make_world(0);
  auto alone = world.split(world.rank() == 0 ? 0 : 1, world.rank(), "alone");
  auto stream = world.device().make_stream("gather", fsdp::StreamPriority::high);
  constexpr std::size_t count = 40000;
  std::size_t const bytes = index(world.size()) * count * sizeof(float);
  auto* const memory = static_cast<float*>(alone.allocate(bytes));
  auto* const own = memory + index(world.rank()) * count;
  for (std::size_t i = 0; i < count; ++i) own[i] = value(world.rank(), i);
  world.all_gather(stream, own, memory, count, label);
  stream.synchronize();
  bool same = true;
  for (int rank = 0; rank < world.size(); ++rank)
    for (std::size_t i = 0; i < count; ++i) same = same && memory[index(rank) * count + i] == value(rank, i);
  CHECK(same);
  world.exchange({}, "done");
  alone.deallocate(memory, bytes);
}

TEST_CASE("the result of an all_reduce out of place is free as soon as it is there") {
  for (int const ranks_per_node : {0, 1}) {
    auto world = make_world(ranks_per_node);
    auto stream = world.device().make_stream("reduce", fsdp::StreamPriority::high);
    constexpr std::size_t count = 30000;
    auto* const memory = static_cast<float*>(world.allocate(2 * count * sizeof(float)));
    float* const result = memory + count;
    fsdp::testing::Draws draws(static_cast<std::uint64_t>(17 + world.rank()));
    std::int64_t wrong = 0;
    for (std::size_t i = 0; i < count; ++i) memory[i] = 1.0f;
    for (int round = 0; round < 40; ++round) {
      world.all_reduce(stream, static_cast<float const*>(memory), result, count, label);
      stream.enqueue([&, pause = draws(2) == 0 ? draws(400) : 0] {
        for (std::size_t i = 0; i < count; ++i) wrong += result[i] != static_cast<float>(world.size());
        for (std::size_t i = 0; i < count; ++i) result[i] = -1.0f;
        std::this_thread::sleep_for(std::chrono::microseconds(pause));
      });
    }
    stream.synchronize();
    CHECK(wrong == 0);
    world.exchange({}, "done");
    world.deallocate(memory, 2 * count * sizeof(float));
  }
}

TEST_CASE("what an all_gather has brought from other nodes may be overwritten as soon as it is complete") {
  auto world = make_world(2);
  auto stream = world.device().make_stream("gather", fsdp::StreamPriority::high);
  constexpr std::size_t count = 100000;
  std::size_t const total = index(world.size()) * count;
  auto* const memory = static_cast<float*>(world.allocate(total * sizeof(float)));
  std::vector<float> const own(count, static_cast<float>(world.rank()));
  float* const slice = memory + index(world.rank()) * count;
  fsdp::testing::Draws draws(static_cast<std::uint64_t>(5 + world.rank()));
  std::int64_t wrong = 0;
  for (int round = 0; round < 40; ++round) {
    stream.enqueue([&, pause = draws(2) == 0 ? draws(400) : 0] {
      std::copy(own.begin(), own.end(), slice);
      std::this_thread::sleep_for(std::chrono::microseconds(pause));
    });
    auto const ticket = world.all_gather(stream, static_cast<float const*>(slice), memory, count, label);
    stream.enqueue([&] {
      for (std::size_t i = 0; i < total; ++i) wrong += memory[i] != static_cast<float>(i / count);
      for (std::size_t i = 0; i < total; ++i)  // not this rank's slice, which peers may read
        if (i / count != index(world.rank())) memory[i] = -1.0f;
    });
    world.wait_for_peers(stream, ticket, fsdp::WaitSite::none);
  }
  stream.synchronize();
  CHECK(wrong == 0);
  world.exchange({}, "done");
  world.deallocate(memory, total * sizeof(float));
}

TEST_CASE("all_reduce writes where its results are asked for and nowhere else, in whatever memory they are") {
  for (int const ranks_per_node : {0, 1, 2}) {
    auto world = make_world(ranks_per_node);
    auto stream = world.device().make_stream("reduce", fsdp::StreamPriority::high);
    constexpr std::size_t count = 30000, few = 30;
    auto* const shared = static_cast<float*>(world.allocate(2 * count * sizeof(float)));
    std::vector<float> own(2 * count);
    // Inputs and results: shared and private, on all ranks or with one rank that differs.
    for (int form = 0; form < 8; ++form) {
      bool const odd = (form & 4) != 0 && world.rank() == world.size() - 1;
      float* const send = ((form & 1) != 0) != odd ? shared : own.data();
      float* const receive = (((form & 2) != 0) != odd ? shared : own.data()) + count;
      for (std::size_t i = 0; i < count; ++i) send[i] = static_cast<float>(i % 11 + index(world.rank()));
      std::fill_n(receive, count, -1.0f);
      auto const wrong = [&](std::size_t reduced, auto const& value) {
        std::int64_t found = 0;
        for (std::size_t i = 0; i < count; ++i) {
          float expected = -1.0f;
          float sum = 0;  // of whole numbers: exact
          for (int rank = 0; rank < world.size(); ++rank) sum += static_cast<float>(i % 11 + index(rank));
          if (i < reduced) expected = value(sum);
          found += receive[i] != expected;
          found += send[i] != static_cast<float>(i % 11 + index(world.rank()));
        }
        world.exchange({}, "looked");
        std::fill_n(receive, count, -1.0f);
        world.exchange({}, "filled");
        return found;
      };
      INFO("form " << form << ", ranks of a node: " << ranks_per_node);
      world.all_reduce(stream, static_cast<float const*>(send), receive, count, label);
      stream.synchronize();
      CHECK(wrong(count, [](float sum) { return sum; }) == 0);
      world.all_reduce(stream, static_cast<float const*>(send), receive, few, label);
      stream.synchronize();
      CHECK(wrong(few, [](float sum) { return sum; }) == 0);
      world.all_reduce_mean(stream, send, receive, count, label);
      stream.synchronize();
      CHECK(wrong(count, [&](float sum) { return sum * (1.0f / static_cast<float>(world.size())); }) == 0);
    }
    world.exchange({}, "done");
    world.deallocate(shared, 2 * count * sizeof(float));
  }
}

TEST_CASE("all ranks get the OrderError, and other communicators go on") {
  for (int const ranks_per_node : {0, 1, 2}) {
    auto world = make_world(ranks_per_node);
    auto part = world.split(0, world.rank(), "part");
    auto stream = world.device().make_stream("gather", fsdp::StreamPriority::high);
    std::vector<float> data(64 * index(world.size()), 1.0f);
    part.all_reduce(stream, data.data(), data.data(), 8, {"block.0", "forward"});
    bool const odd = world.rank() == world.size() - 1;
    part.all_gather(stream, data.data(), data.data(), odd ? 0 : 8, {odd ? "block.2" : "block.1", "forward"});
    auto const text = thrown<fsdp::OrderError>([&] { stream.synchronize(); });
    INFO(text);
    CHECK(text.rfind(fmt::format("rank {}: ", world.rank()), 0) == 0);
    CHECK(text.find("collective 2") != std::string::npos);
    CHECK(text.find("rank 0 runs all_gather of 8 fp32 for unit 'block.1' (forward)") != std::string::npos);
    CHECK(text.find(fmt::format("rank {} runs all_gather of 0 fp32 for unit 'block.2' (forward)", world.size() - 1)) !=
          std::string::npos);
    CHECK_THROWS_AS(part.all_gather(stream, data.data(), data.data(), 8, label), fsdp::OrderError);

    auto other = world.split(0, world.rank(), "other");
    auto healthy = world.device().make_stream("other", fsdp::StreamPriority::high);
    std::vector<double> one(3, 1.0);
    other.all_reduce(healthy, one.data(), one.data(), one.size(), label);
    healthy.synchronize();
    CHECK(one == std::vector<double>(3, static_cast<double>(world.size())));
  }
}

TEST_CASE("an error inside a collective reaches the ranks of the node") {
  auto world = make_world(0);
  auto part = world.split(0, world.rank(), "part");
  auto stream = world.device().make_stream("gather", fsdp::StreamPriority::high);
  constexpr std::size_t count = 64;
  std::size_t const bytes = index(world.size()) * count * sizeof(float);
  auto* const first = static_cast<float*>(part.allocate(bytes));
  auto* const second = static_cast<float*>(part.allocate(bytes));
  if (world.rank() == 0) part.deallocate(first, bytes);  // the others still move data in it
  auto* const memory = world.rank() == 0 ? second : first;
  auto const run = [&] {
    part.all_gather(stream, memory + index(world.rank()) * count, memory, count, label);
    stream.synchronize();
    part.all_gather(stream, memory + index(world.rank()) * count, memory, count, label);
    stream.synchronize();
  };
  if (world.rank() == 0) {
    CHECK(thrown<fsdp::UsageError>(run).find("memory that this rank has deallocated") != std::string::npos);
  } else {
    CHECK(thrown<fsdp::PeerError>(run).find("rank 0 failed: rank 0: ") != std::string::npos);
  }
  world.exchange({}, "done");
}
