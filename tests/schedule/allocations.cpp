// SPDX-License-Identifier: Apache-2.0
// A training step allocates nothing, from the third on: not in the engine, its streams, its communicators, or the
// optimizer. Over threads of this process.
// skip-sanitizers
#include "tests/schedule/allocations.hpp"

#include <atomic>
#include <barrier>
#include <new>
#include <thread>
#include <utility>

#include "fsdp/host.hpp"
#include "fsdp/local.hpp"

namespace allocations {
namespace {

using fsdp::testing::begin_counting;
using fsdp::testing::end_counting;

/// Number of allocations of all ranks together.
long in_steps(fsdp::ShardingStrategy const& strategy, int ranks, toy::Run const& run, fsdp::host::Device device = {}) {
  std::barrier all(ranks);
  long found = -1;
  fsdp::local::run(ranks, device, [&](fsdp::local::Communicator<fsdp::host::Device> comm) {
    bool const first = comm.rank() == 0;
    train(
        strategy, std::move(comm), run,
        [&] {
          all.arrive_and_wait();
          if (first) begin_counting();
          all.arrive_and_wait();
        },
        [&] {
          all.arrive_and_wait();
          if (first) found = end_counting();
          all.arrive_and_wait();
        });
  });
  return found;
}

}  // namespace

TEST_CASE("what any thread allocates is counted") {
  fsdp::host::Stream stream("allocates");
  begin_counting();
  stream.enqueue([] {
    ::operator delete(::operator new(8));
    ::operator delete (::operator new (8, std::align_val_t{256}), std::align_val_t{256});
  });
  stream.synchronize();
  CHECK(end_counting() == 2);
}

TEST_CASE("from the third step on nothing is allocated, whatever the strategy") {
  for (int const ranks : {1, 2, 4})
    for_each_run(ranks, [&](fsdp::ShardingStrategy const& strategy, toy::Run const& run) {
      INFO(strategy.name << ", " << ranks << " ranks, " << run.micro_steps << " micro-steps");
      CHECK(in_steps(strategy, ranks, run) == 0);
    });
  CHECK(in_steps(fsdp::FullShard{}, 2, small_run(), {.threads = 2}) == 0);
}

TEST_CASE("a queue that has grown keeps its size") {
  fsdp::host::Stream stream("deep");
  std::atomic<bool> goes_on{false};
  auto const fill = [&](int tasks) {
    goes_on.store(false);
    stream.enqueue([&goes_on] {
      while (!goes_on.load()) std::this_thread::yield();
    });
    for (int i = 0; i < tasks; ++i) stream.enqueue([i] { static_cast<void>(i); });
    goes_on.store(true);
    stream.synchronize();
  };
  begin_counting();
  fill(10'000);
  CHECK(end_counting() > 0);
  fill(10'000);  // all in one ring
  begin_counting();
  for (int round = 0; round < 5; ++round) fill(10'000);
  CHECK(end_counting() == 0);
}

}  // namespace allocations
