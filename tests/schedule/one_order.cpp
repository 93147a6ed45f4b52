// SPDX-License-Identifier: Apache-2.0
// Threads of one process: a rank that does what the others do not is an error on every rank, at once. See
// one_order.hpp.
// skip-asan
#include <chrono>
#include <mutex>
#include <string>
#include <thread>

#include "fsdp/host.hpp"
#include "fsdp/local.hpp"
#include "tests/catch.hpp"
#include "tests/schedule/one_order.hpp"

namespace {

using Comm = fsdp::local::Communicator<fsdp::host::Device>;

constexpr fsdp::Label label{"unit", "test"};

/// Errors in the end of any rank.
std::string one_case(fsdp::ShardingStrategy const& strategy, int ranks, one_order::Fault fault, one_order::Next next) {
  std::mutex guard;
  std::string problems;
  auto const ended = one_order::outcome_of([&] {
    fsdp::local::run(ranks, fsdp::host::Device{}, [&](Comm comm) {
      int const rank = comm.rank();
      auto const got = one_order::misbehave(strategy, std::move(comm), fault, next);
      std::lock_guard const lock(guard);
      problems += one_order::verdict(fault, next, rank, ranks, got, !strategy.grouped);
    });
  });
  return ended.kind == "well" ? problems : problems + "run() ended: " + ended.text + "\n";
}

/// A wait that misses the deadline ends this program.
struct Deadline {
  Deadline() { fsdp::host::set_wait_deadline(std::chrono::seconds(60)); }
} const deadline;

}  // namespace

TEST_CASE("a rank that reduces not, or clips alone, is an error on every rank") {
  for (int const ranks : {2, 3})
    for (auto const fault : one_order::faults)
      for (auto const next : one_order::nexts) CHECK(one_case(fsdp::FullShard{}, ranks, fault, next) == "");
}

TEST_CASE("a rank that reduces not, or clips alone, is an error in a mesh, where ranks wait in different groups") {
  for (auto const fault : one_order::faults)
    CHECK(one_case(fsdp::HybridShard<>{.group = 2}, 4, fault, one_order::Next::mean) == "");
}

TEST_CASE("a rank that steps, discards or clips otherwise is an error on every rank, at the next collective") {
  for (auto const how : one_order::drifts) {
    for (bool const sharded : {true, false}) {
      std::mutex guard;
      std::string problems;
      auto const ended = one_order::outcome_of([&] {
        fsdp::local::run(3, fsdp::host::Device{}, [&](Comm comm) {
          int const rank = comm.rank();
          auto const got = sharded ? one_order::drift(fsdp::FullShard{}, std::move(comm), how)
                                   : one_order::drift(fsdp::NoShard{}, std::move(comm), how);
          std::lock_guard const lock(guard);
          problems += one_order::verdict(how, rank, got);
        });
      });
      CHECK(problems == "");
      CHECK(ended.kind == "well");
    }
  }
}

TEST_CASE("ranks that wait in a circle, no two of them for each other, all get an OrderError") {
  std::mutex guard;
  std::string texts;
  int errors = 0;
  fsdp::local::run(4, fsdp::host::Device{}, [&](Comm comm) {
    auto row = comm.split(comm.rank() / 2, comm.rank(), "row");        // {0, 1} and {2, 3}
    auto column = comm.split(comm.rank() % 2, comm.rank(), "column");  // {0, 2} and {1, 3}
    auto stream = comm.device().make_stream("collectives", fsdp::StreamPriority::high);
    float value = 1;
    bool const in_row = comm.rank() == 0 || comm.rank() == 3;
    auto const got = one_order::outcome_of(
        [&] { (in_row ? row : column).all_reduce(stream, static_cast<float const*>(&value), &value, 1, label); });
    std::lock_guard const lock(guard);
    errors += got.kind == "order" ? 1 : 0;
    texts += got.text + "\n";
  });
  INFO(texts);
  CHECK(errors == 4);
  for (auto const* part : {"rank 0 is in all_reduce for unit 'unit' (test) on 'row' and waits for rank 1",
                           "rank 1 is in all_reduce for unit 'unit' (test) on 'column' and waits for rank 3",
                           "rank 2 is in all_reduce for unit 'unit' (test) on 'column' and waits for rank 0",
                           "rank 3 is in all_reduce for unit 'unit' (test) on 'row' and waits for rank 2"})
    CHECK(texts.find(part) != std::string::npos);
}

TEST_CASE("ranks that are late, asleep or in calls of their own are no error") {
  fsdp::local::run(4, fsdp::host::Device{}, [&](Comm comm) {
    auto row = comm.split(comm.rank() / 2, comm.rank(), "row");
    auto column = comm.split(comm.rank() % 2, comm.rank(), "column");
    auto stream = comm.device().make_stream("collectives", fsdp::StreamPriority::high);
    auto other = comm.device().make_stream("other", fsdp::StreamPriority::high);
    float value = 1, apart = 1;
    for (int round = 0; round < 40; ++round) {
      if (round % 4 == comm.rank()) std::this_thread::sleep_for(std::chrono::milliseconds(3));
      auto const ticket = row.all_reduce(stream, static_cast<float const*>(&value), &value, 1, label);
      row.wait_for_peers(stream, ticket, fsdp::WaitSite::none);
      if (comm.rank() / 2 == 0) {
        for (int i = 0; i < 3; ++i) row.exchange({}, "a row of its own");
      }
      auto const last = column.all_reduce(other, static_cast<float const*>(&apart), &apart, 1, label);
      column.wait_for_peers(other, last, fsdp::WaitSite::none);
      if (round % 5 == 0) comm.exchange({}, "all");
    }
    comm.device().synchronize(stream);
    comm.device().synchronize(other);
    comm.exchange({}, "done");
  });
}
