// SPDX-License-Identifier: Apache-2.0
// Order of work around a collective, as ThreadSanitizer sees it: ranks are threads. Without the sanitizer the same
// programs run, and nothing is looked for.
// environment: FSDP_STANDIN_DEVICES=3
#include <cstddef>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/catch.hpp"
#include "tests/standin/nccl/ranks.hpp"
#include "tests/standin/races.hpp"

namespace {

using standin::test::check;
using standin::test::expect;
using standin::test::looks_for_races;
using standin::test::Memory;
using standin::test::Rank;

constexpr int size = 3;
constexpr std::size_t count = 8;

/// Three ranks, driven by the thread of the test, and memory of each with a part for every rank.
struct Ranks {
  Ranks() {
    auto const id = standin::test::new_identifier();
    auto const error = standin::test::on_threads(size, [&](int place) {
      auto const at = static_cast<std::size_t>(place);
      rank[at] = std::make_unique<Rank>(id, place, size, place);
      memory[at] = std::make_unique<Memory<float>>(size * count);
      check(cudaStreamCreateWithFlags(&other[at], cudaStreamNonBlocking), "stream");
    });
    expect(error.empty(), error);
  }
  Ranks(Ranks const&) = delete;
  Ranks& operator=(Ranks const&) = delete;
  ~Ranks() {
    static_cast<void>(standin::test::on_threads(size, [&](int place) {
      auto const at = static_cast<std::size_t>(place);
      rank[at].reset();
      memory[at].reset();
      static_cast<void>(cudaStreamDestroy(other[at]));
    }));
  }
  cudaStream_t stream(int place) const { return rank[static_cast<std::size_t>(place)]->stream; }
  cudaStream_t second_stream(int place) const { return other[static_cast<std::size_t>(place)]; }
  float* data(int place) const { return memory[static_cast<std::size_t>(place)]->data(); }
  float* own(int place) const { return data(place) + static_cast<std::size_t>(place) * count; }
  ncclComm_t comm(int place) const { return rank[static_cast<std::size_t>(place)]->comm; }

  /// A kernel that writes or reads `count` floats.
  static void write(cudaStream_t on, float* to) {
    check(standin::enqueue(on, "a write",
                           [to] {
                             for (std::size_t i = 0; i < count; ++i) to[i] = 1;
                             return true;
                           }),
          "enqueue");
  }
  static void read(cudaStream_t on, float const* from) {
    check(standin::enqueue(on, "a read",
                           [from] {
                             float volatile total = 0;
                             for (std::size_t i = 0; i < count; ++i) total = total + from[i];
                             return true;
                           }),
          "enqueue");
  }
  void order(int place, cudaStream_t before, cudaStream_t after) const {
    cudaEvent_t event = nullptr;
    check(cudaSetDevice(place), "cudaSetDevice");
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "event");
    check(cudaEventRecord(event, before), "record");
    check(cudaStreamWaitEvent(after, event, 0), "wait");
    check(cudaEventDestroy(event), "destroy");
  }
  void gather() const {
    for (int place = 0; place < size; ++place)
      check(ncclAllGather(own(place), data(place), count, ncclFloat32, comm(place), stream(place)), "ncclAllGather");
  }
  void scatter() const {
    for (int place = 0; place < size; ++place)
      check(ncclReduceScatter(data(place), own(place), count, ncclFloat32, ncclSum, comm(place), stream(place)),
            "ncclReduceScatter");
  }
  void broadcast() const {
    for (int place = 0; place < size; ++place) broadcast(place, stream(place), data(place));
  }
  void broadcast(int place, cudaStream_t on, float* to) const {
    check(ncclBroadcast(to, to, count, ncclFloat32, 0, comm(place), on), "ncclBroadcast");
  }
  void finish() const {
    for (int place = 0; place < size; ++place) {
      check(cudaStreamSynchronize(stream(place)), "synchronize");
      check(cudaStreamSynchronize(second_stream(place)), "synchronize");
    }
  }

  std::unique_ptr<Rank> rank[size];
  std::unique_ptr<Memory<float>> memory[size];
  cudaStream_t other[size] = {};
};

/// Whether `action` has a race, in memory that was written before.
bool race(std::function<void(Ranks&)> const& action) {
  Ranks ranks;
  for (int place = 0; place < size; ++place) {
    for (std::size_t part = 0; part < size; ++part) Ranks::write(ranks.stream(place), ranks.data(place) + part * count);
  }
  ranks.finish();
  return standin::test::races_during([&] {
           action(ranks);
           ranks.finish();
         }) > 0;
}

}  // namespace

TEST_CASE("collectives on a rank's stream come after what it did before, and before what it does next", "[standin]") {
  CHECK_FALSE(race([](Ranks& r) {
    for (int i = 0; i < 3; ++i) {
      for (int place = 0; place < size; ++place) Ranks::write(r.stream(place), r.own(place));
      r.gather();
      for (int place = 0; place < size; ++place) Ranks::write(r.stream(place), r.data(place));
      r.scatter();
      r.broadcast();
    }
  }));
}

TEST_CASE("another stream waits for a collective's result by an event", "[standin]") {
  for (bool const wait : {true, false}) {
    CHECK(race([&](Ranks& r) {
            r.gather();
            if (wait) r.order(0, r.stream(0), r.second_stream(0));
            Ranks::read(r.second_stream(0), r.data(0) + count);
          }) == (looks_for_races && !wait));
  }
}

TEST_CASE("a collective's input is ready by an event where another stream makes it", "[standin]") {
  for (bool const wait : {true, false}) {
    CHECK(race([&](Ranks& r) {
            Ranks::write(r.second_stream(1), r.own(1));
            if (wait) r.order(1, r.second_stream(1), r.stream(1));
            r.gather();
          }) == (looks_for_races && !wait));
  }
}

TEST_CASE("another stream may overwrite an input after the collective, and not during it", "[standin]") {
  for (bool const wait : {true, false}) {
    CHECK(race([&](Ranks& r) {
            r.scatter();
            if (wait) r.order(0, r.stream(0), r.second_stream(0));
            Ranks::write(r.second_stream(0), r.data(0) + count);
          }) == (looks_for_races && !wait));
  }
}

TEST_CASE("what comes before a rank's input comes before its peers' outputs", "[standin]") {
  CHECK_FALSE(race([](Ranks& r) {
    Ranks::write(r.stream(1), r.own(1));
    r.gather();
    Ranks::read(r.stream(0), r.own(1));  // of the peer, in its memory
  }));
  CHECK_FALSE(race([](Ranks& r) {
    Ranks::write(r.stream(0), r.data(0));
    r.broadcast();
    Ranks::read(r.stream(1), r.data(0));
  }));
}

TEST_CASE("a peer's output is not ready when this rank's is", "[standin]") {
  CHECK(race([](Ranks& r) {
          r.gather();
          Ranks::read(r.stream(0), r.data(1));
        }) == looks_for_races);
}

TEST_CASE("who receives a broadcast holds up neither its root nor other receivers", "[standin]") {
  for (int const reader : {0, 2}) {
    CHECK(race([&](Ranks& r) {
            Ranks::write(r.stream(1), r.own(1));
            r.broadcast();
            Ranks::read(r.stream(reader), r.own(1));
          }) == looks_for_races);
  }
}

TEST_CASE("collectives of one communicator on two streams order no other work of the streams", "[standin]") {
  CHECK(race([](Ranks& r) {
          Ranks::write(r.stream(0), r.data(0) + count);
          r.broadcast();
          for (int place = 0; place < size; ++place)
            r.broadcast(place, r.second_stream(place), r.data(place) + 2 * count);
          Ranks::read(r.second_stream(0), r.data(0) + count);
        }) == looks_for_races);
}
