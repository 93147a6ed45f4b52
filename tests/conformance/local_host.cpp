// SPDX-License-Identifier: Apache-2.0
// local::Communicator over the host device.
// long
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fsdp/communicator.hpp"
#include "fsdp/detail/mpi/sums.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"
#include "tests/conformance/communicator_suite.hpp"

namespace {

struct LocalHost {
  using Communicator = fsdp::local::Communicator<fsdp::host::Device>;
  static constexpr bool fixed_tree = true;
  static constexpr bool reports_order = true;
  static constexpr bool reports_peers = true;
  static std::vector<int> sizes() {
    if (fsdp::conformance::sanitized) return {3};
    return {1, 2, 3, 4, 7};
  }
  template <class Body>
  static void run(int ranks, Body const& body) {
    fsdp::local::run(ranks, fsdp::host::Device{}, [&](Communicator& comm) { body(comm); });
  }
};

/// The same, behind a communicator that is chosen at run time.
struct AnyLocalHost : LocalHost {
  using Communicator = fsdp::AnyCommunicator<fsdp::host::Device>;
  static std::vector<int> sizes() { return {3}; }
  template <class Body>
  static void run(int ranks, Body const& body) {
    fsdp::local::run(ranks, fsdp::host::Device{}, [&](LocalHost::Communicator& comm) {
      Communicator any(std::move(comm));
      body(any);
    });
  }
};

}  // namespace

FSDP_COMMUNICATOR_SUITE("local<host>", LocalHost);
FSDP_COMMUNICATOR_SUITE("any<local<host>>", AnyLocalHost);

namespace {

using fsdp::conformance::expect;
using fsdp::conformance::expect_throws;
using Comm = LocalHost::Communicator;
constexpr fsdp::Label label{"unit", "test"};

}  // namespace

TEST_CASE("local<host>: memory is freed after peers have read it", "[communicator]") {
  LocalHost::run(3, [](Comm& comm) {
    auto stream = comm.device().make_stream("collectives", fsdp::StreamPriority::high);
    constexpr std::size_t count = 5000;
    std::vector<float> all(3 * count);
    {
      fsdp::conformance::Buffer<float, Comm> mine(comm, count);
      std::fill_n(mine.data(), count, static_cast<float>(comm.rank() + 1));
      if (comm.rank() != 0) fsdp::testing::delay(comm.device(), stream, 20000);
      comm.all_gather(stream, static_cast<float const*>(mine.data()), all.data(), count, label);
      comm.device().synchronize(stream);
    }
    for (std::size_t i = 0; i < all.size(); ++i) {
      expect(all[i] == static_cast<float>(i / count + 1), "rank {}: element {} is {}", comm.rank(), i, all[i]);
    }
  });
}

TEST_CASE("local<host>: a rank that leaves early is named to its peers", "[communicator]") {
  auto const text = expect_throws<fsdp::PeerError>("a collective without rank 1", [] {
    fsdp::local::run(2, fsdp::host::Device{}, [](Comm comm) {
      if (comm.rank() == 1) return;
      auto stream = comm.device().make_stream("collectives", fsdp::StreamPriority::high);
      float value = 1;
      comm.all_reduce(stream, static_cast<float const*>(&value), &value, 1, label);
    });
  });
  CHECK(text.find("rank 1 has left") != std::string::npos);
  CHECK(text.find("all_reduce") != std::string::npos);
}

TEST_CASE("local<host>: the two forms of all_reduce do not mix", "[communicator]") {
  LocalHost::run(2, [](Comm& comm) {
    auto stream = comm.device().make_stream("collectives", fsdp::StreamPriority::high);
    float values[2] = {1, 2};
    expect_throws<fsdp::OrderError>("in place here, out of place there", [&] {
      comm.all_reduce(stream, static_cast<float const*>(values), values + comm.rank(), 1, label);
    });
  });
}

TEST_CASE("local<host>: a failing task of a stream fails its rank and is what run() rethrows", "[communicator]") {
  auto const text = expect_throws<fsdp::conformance::Failure>("a run with a failing task", [] {
    LocalHost::run(2, [](Comm& comm) {
      auto stream = comm.device().make_stream("collectives", fsdp::StreamPriority::high);
      float value = 1;
      if (comm.rank() == 1) stream.enqueue([] { throw fsdp::conformance::Failure("a task of rank 1"); });
      for (int i = 0; i < 100000; ++i) {
        auto const ticket = comm.all_reduce(stream, static_cast<float const*>(&value), &value, 1, label);
        comm.wait_for_peers(stream, ticket, fsdp::WaitSite::none);
      }
    });
  });
  CHECK(text == "a task of rank 1");
}

TEST_CASE("local<host>: a rank that hears of its own failure from a peer throws the cause", "[communicator]") {
  std::atomic<bool> waits{false}, fails{false};
  auto const text = expect_throws<fsdp::conformance::Failure>("a run with a failing task", [&] {
    LocalHost::run(2, [&](Comm& comm) {
      auto stream = comm.device().make_stream("collectives", fsdp::StreamPriority::high);
      float value = 1;
      auto const reduce = [&] { comm.all_reduce(stream, &std::as_const(value), &value, 1, label); };
      if (comm.rank() == 1)
        stream.enqueue([&] {
          while (!fails) std::this_thread::yield();
          throw fsdp::conformance::Failure("a task of rank 1");
        });
      reduce();
      if (comm.rank() == 1) {
        waits = true;
        reduce();  // waits for rank 0, which does not come any more
      } else {
        while (!waits) std::this_thread::yield();
        std::this_thread::sleep_for(std::chrono::milliseconds{20});
        fails = true;
        while (stream.failure() == nullptr) std::this_thread::yield();
        reduce();
      }
    });
  });
  CHECK(text == "a task of rank 1");
}

TEST_CASE("local<host>: more than eight ranks sum in the same tree", "[communicator]") {
  for (int const ranks : {9, 21, 130}) {
    if (fsdp::conformance::sanitized && ranks > 9) break;
    LocalHost::run(ranks, [](Comm& comm) {
      fsdp::conformance::Rank<Comm> rank(comm);
      using Suite = fsdp::conformance::CommunicatorSuite<LocalHost>;
      Suite::check_reduce_scatter<float>(rank, 211, false, Suite::Rough<float>{3});
      Suite::check_all_reduce<fsdp::bf16>(rank, 5003, true, Suite::Rough<fsdp::bf16>{4});
    });
  }
}

TEST_CASE("more ranks than a kernel takes sum in the same tree: processes") {
  auto const check = [](auto type, int ranks) {
    using T = decltype(type);
    constexpr std::size_t count = 300;
    std::vector<std::vector<T>> terms;
    std::vector<void const*> sources;
    for (int rank = 0; rank < ranks; ++rank) {
      terms.emplace_back(count);
      for (std::size_t i = 0; i < count; ++i) terms.back()[i] = fsdp::conformance::rough<T>(rank, i, 9);
      sources.push_back(terms.back().data());
    }
    std::vector<T> sum(count), expected(count);
    fsdp::mpi::detail::pairwise_sum(fsdp::dtype_of<T>, sources.data(), sources.size(), sum.data(), count);
    for (std::size_t i = 0; i < count; ++i)
      expected[i] =
          fsdp::conformance::tree_sum<T>(ranks, [&](int rank) { return terms[static_cast<std::size_t>(rank)][i]; });
    fsdp::conformance::expect_equal(sum, expected, fmt::format("{} ranks", ranks));
  };
  for (int const ranks : {256, 257, 700}) {
    check(float{}, ranks);
    check(fsdp::bf16{}, ranks);
  }
}

TEST_CASE("local<host>: run() refuses impossible sizes and takes a device per rank", "[communicator]") {
  CHECK_THROWS_AS(LocalHost::run(0, [](Comm&) {}), fsdp::ConfigError);
  CHECK_THROWS_AS(LocalHost::run(257, [](Comm&) {}), fsdp::ConfigError);
  std::atomic<int> sum{0};
  fsdp::local::run(
      3,
      [&sum](int rank) {
        sum += rank;
        return fsdp::host::Device{};
      },
      [](Comm) {});
  CHECK(sum == 3);
}
