// SPDX-License-Identifier: Apache-2.0
// Processes: a rank that does what the others do not is an error on every rank, at once. See one_order.hpp.
// ranks: 4
// full-ranks: 2
// skip-sanitizers
#include <chrono>
#include <string>
#include <thread>

#include "fsdp/mpi.hpp"
#include "tests/catch.hpp"
#include "tests/mpi_main.hpp"
#include "tests/schedule/one_order.hpp"

namespace {

constexpr fsdp::Label label{"unit", "test"};

/// A wait that misses the deadline ends the run.
fsdp::mpi::Communicator make_world(int ranks_per_node) {
  fsdp::mpi::Options options;
  options.timeout = std::chrono::hours(1);  // never reached, whatever stops this machine for a while
  options.ranks_per_node = ranks_per_node;
  return fsdp::mpi::Communicator(test_environment(), {}, options);
}

/// Errors in this rank's end, on nodes of so many ranks.
/// @param named  whether the message must name the calls: between nodes, only how many there were may be known
std::string one_case(fsdp::ShardingStrategy const& strategy, int ranks_per_node, one_order::Fault fault,
                     one_order::Next next, bool named) {
  auto world = make_world(ranks_per_node);
  int const rank = world.rank();
  int const size = world.size();
  auto const got = one_order::misbehave(strategy, std::move(world), fault, next);
  try {
    test_environment().expect_equal_ends();
  } catch (fsdp::OrderError const&) {  // where no collective followed, only the end of the run finds it
    if (next != one_order::Next::nothing) throw;
  }
  return one_order::verdict(fault, next, rank, size, got, named);
}

}  // namespace

TEST_CASE("a rank that reduces not, or clips alone, is an error on every rank, on one node and between nodes") {
  for (int const ranks_per_node : {0, 1})
    for (auto const fault : one_order::faults)
      for (auto const next : one_order::nexts)
        CHECK(one_case(fsdp::FullShard{}, ranks_per_node, fault, next, ranks_per_node == 0) == "");
}

TEST_CASE("a rank that reduces not, or clips alone, is an error in a mesh, where ranks wait in different groups") {
  if (test_environment().size() < 4) return;
  for (int const ranks_per_node : {0, 1, 2})
    for (auto const fault : one_order::faults)
      CHECK(one_case(fsdp::HybridShard<>{.group = 2}, ranks_per_node, fault, one_order::Next::mean, false) == "");
}

TEST_CASE("a rank that steps, discards or clips otherwise is an error on every rank, at the next collective") {
  for (int const ranks_per_node : {0, 1}) {
    for (auto const how : one_order::drifts) {
      auto world = make_world(ranks_per_node);
      int const rank = world.rank();
      CHECK(one_order::verdict(how, rank, one_order::drift(fsdp::FullShard{}, std::move(world), how)) == "");
    }
  }
}

TEST_CASE("ranks that wait in different communicators, and call nothing else, all get an OrderError") {
  for (int const ranks_per_node : {0, 1}) {
    auto world = make_world(ranks_per_node);
    auto const got = one_order::outcome_of([&] {
      auto one = world.split(0, world.rank(), "one");
      auto two = world.split(0, world.rank(), "two");
      auto stream = world.device().make_stream("collectives", fsdp::StreamPriority::high);
      double value = 1;
      (world.rank() == 0 ? one : two).all_reduce(stream, static_cast<double const*>(&value), &value, 1, label);
      stream.synchronize();
    });
    INFO(got.text);
    CHECK(got.kind == "order");
    CHECK(got.text.find("rank 0 calls all_reduce for unit 'unit' (test) on 'one', but rank") != std::string::npos);
    CHECK(got.text.find("calls all_reduce for unit 'unit' (test) on 'two'") != std::string::npos);
  }
}

TEST_CASE("two ranks that wait in communicators of different ranks, both of both, get an OrderError") {
  for (int const ranks_per_node : {0, 1}) {
    auto world = make_world(ranks_per_node);
    if (world.size() < 4) return;
    // Rank 3 alone calls all ranks first; ranks 0 and 1 call nothing of what ranks 2 and 3 wait in.
    auto const got = one_order::outcome_of([&] {
      auto row = world.split(world.rank() / 2, world.rank(), "row");
      auto stream = world.device().make_stream("collectives", fsdp::StreamPriority::high);
      auto other = world.device().make_stream("other", fsdp::StreamPriority::high);
      double value = 1;
      if (world.rank() == 3) world.all_reduce(other, static_cast<double const*>(&value), &value, 1, label);
      row.all_reduce(stream, static_cast<double const*>(&value), &value, 1, label);
      stream.synchronize();
      other.synchronize();
    });
    INFO(got.text);
    if (world.rank() < 2) {
      CHECK((got.kind == "well" || got.kind == "order"));
    } else {
      CHECK(got.kind == "order");
    }
  }
}

TEST_CASE("ranks that are late, asleep or in calls of their own are no error") {
  for (int const ranks_per_node : {0, 1}) {
    auto world = make_world(ranks_per_node);
    auto row = world.split(world.rank() / 2, world.rank(), "row");
    auto column = world.split(world.rank() % 2, world.rank(), "column");
    auto stream = world.device().make_stream("collectives", fsdp::StreamPriority::high);
    auto other = world.device().make_stream("other", fsdp::StreamPriority::high);
    double value = 1, apart = 1;
    for (int round = 0; round < 6; ++round) {
      auto const nap = std::chrono::milliseconds(round % 4 == world.rank() ? 130 : 1);
      if (round % 3 == 0) std::this_thread::sleep_for(nap);
      stream.enqueue([nap] { std::this_thread::sleep_for(nap); });
      row.all_reduce(stream, static_cast<double const*>(&value), &value, 1, label);
      if (world.rank() / 2 == 0) {
        for (int i = 0; i < 3; ++i) row.exchange({}, "a row of its own");
      }
      column.all_reduce(other, static_cast<double const*>(&apart), &apart, 1, label);
      if (round % 5 == 0) world.exchange({}, "all");
    }
    stream.synchronize();
    other.synchronize();
    CHECK(world.exchange({}, "done").size() == static_cast<std::size_t>(world.size()));
  }
}
