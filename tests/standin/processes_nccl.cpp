// SPDX-License-Identifier: Apache-2.0
// The stand-in for NCCL between processes: what arrives, in which order sums are made, lost peers, and how many
// collectives a device has room for.
// environment: FSDP_STANDIN_DEVICES=4
#include <signal.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fsdp/nccl.hpp"
#include "tests/catch.hpp"
#include "tests/standin/nccl/occupancy.hpp"
#include "tests/standin/nccl/ranks.hpp"
#include "tests/standin/runtime/unseen.hpp"

namespace {

using standin::test::check;
using standin::test::expect;
using standin::test::failures;
using standin::test::in_processes;
using standin::test::Memory;
using standin::test::new_identifier;
using standin::test::on_threads;
using standin::test::Rank;

std::int64_t value(int rank, std::size_t i) { return static_cast<std::int64_t>(i % 977) * 8 + rank; }

std::vector<std::int64_t> values(int rank, std::size_t count) {
  std::vector<std::int64_t> result(count);
  for (std::size_t i = 0; i < count; ++i) result[i] = value(rank, i);
  return result;
}
std::int64_t sum(int ranks, std::size_t i) {
  std::int64_t total = 0;
  for (int rank = 0; rank < ranks; ++rank) total += value(rank, i);
  return total;
}

/// The four collectives, in place and apart, with counts of one piece and of several.
void every_collective(Rank const& r) {
  auto const size = static_cast<std::size_t>(r.size), rank = static_cast<std::size_t>(r.rank);
  for (std::size_t const count : {1u, 7u, 1000u, 40000u}) {
    for (bool const in_place : {false, true}) {
      auto const part = std::string(in_place ? " in place" : "") + " of " + std::to_string(count);
      Memory<std::int64_t> large(count * size), small(count), other(count);
      auto* const own = large.data() + rank * count;

      auto* const send = in_place ? own : small.data();
      r.upload(send, values(r.rank, count));
      check(ncclAllGather(send, large.data(), count, ncclInt64, r.comm, r.stream), "ncclAllGather");
      auto got = r.download(large.data(), count * size);
      for (std::size_t i = 0; i < got.size(); ++i)
        expect(got[i] == value(static_cast<int>(i / count), i % count), "ncclAllGather" + part);

      r.upload(large.data(), values(r.rank, count * size));
      auto* const receive = in_place ? own : small.data();
      check(ncclReduceScatter(large.data(), receive, count, ncclInt64, ncclSum, r.comm, r.stream), "ncclReduceScatter");
      got = r.download(receive, count);
      for (std::size_t i = 0; i < count; ++i)
        expect(got[i] == sum(r.size, rank * count + i), "ncclReduceScatter" + part);

      auto* const result = in_place ? small.data() : other.data();
      r.upload(small.data(), values(r.rank, count));
      check(ncclAllReduce(small.data(), result, count, ncclInt64, ncclSum, r.comm, r.stream), "ncclAllReduce");
      got = r.download(result, count);
      for (std::size_t i = 0; i < count; ++i) expect(got[i] == sum(r.size, i), "ncclAllReduce" + part);

      int const root = r.size - 1;
      r.upload(small.data(), values(r.rank, count));
      check(ncclBroadcast(small.data(), result, count, ncclInt64, root, r.comm, r.stream), "ncclBroadcast");
      expect(r.download(result, count) == values(root, count), "ncclBroadcast" + part);
    }
  }
}

float round_to_bf16(float x) {
  auto bits = std::uint32_t{0};
  std::memcpy(&bits, &x, sizeof x);
  bits = (bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
float from_bf16(std::uint16_t half) {
  auto const bits = static_cast<std::uint32_t>(half) << 16;
  float x = 0;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
std::uint16_t to_bf16(float x) {
  x = round_to_bf16(x);
  std::uint32_t bits = 0;
  std::memcpy(&bits, &x, sizeof x);
  return static_cast<std::uint16_t>(bits >> 16);
}

}  // namespace

TEST_CASE("collectives between processes, and between processes that have several ranks", "[standin]") {
  for (int const ranks : {1, 2, 3, 4}) {
    auto const id = new_identifier();
    CHECK(failures(in_processes(ranks, [&](int rank) { every_collective(Rank(id, rank, ranks, rank)); })) == "");
  }
  auto const id = new_identifier();
  CHECK(failures(in_processes(2, [&](int process) {
          auto const error = on_threads(2, [&](int thread) {
            int const rank = 2 * thread + process;
            every_collective(Rank(id, rank, 4, rank));
          });
          expect(error.empty(), error);
        })) == "");
}

TEST_CASE("sums begin after the rank that gets them, and are rounded at each rank", "[standin]") {
  constexpr int ranks = 3;
  auto const term = [](int rank, std::size_t i) {
    return round_to_bf16(1.0f + static_cast<float>((static_cast<std::size_t>(rank) * 7 + i * 5) % 11) * 0.37f);
  };
  auto const expected = [&](int first, std::size_t i) {
    float total = term(first % ranks, i);
    for (int hop = 1; hop < ranks; ++hop) total = round_to_bf16(total + term((first + hop) % ranks, i));
    return total;
  };
  int sensitive = 0;  // elements whose sum depends on the order
  for (std::size_t i = 0; i < 30; ++i) sensitive += expected(0, i) != expected(1, i) ? 1 : 0;
  REQUIRE(sensitive > 0);
  auto const id = new_identifier();
  CHECK(failures(in_processes(ranks, [&](int rank) {
          Rank const r(id, rank, ranks, rank);
          std::vector<std::uint16_t> mine;
          for (std::size_t i = 0; i < 30; ++i) mine.push_back(to_bf16(term(rank, i)));
          Memory<std::uint16_t> data(30), part(10);
          r.upload(data.data(), mine);
          check(ncclReduceScatter(data.data(), part.data(), 10, ncclBfloat16, ncclSum, r.comm, r.stream), "scatter");
          auto got = r.download(part.data(), 10);
          for (std::size_t i = 0; i < 10; ++i)
            expect(from_bf16(got[i]) == expected(rank + 1, static_cast<std::size_t>(rank) * 10 + i), "reduce-scatter");
          check(ncclAllReduce(data.data(), data.data(), 30, ncclBfloat16, ncclSum, r.comm, r.stream), "all-reduce");
          got = r.download(data.data(), 30);
          for (std::size_t i = 0; i < 30; ++i)
            expect(from_bf16(got[i]) == expected(static_cast<int>(i / 10) + 1, i), "all-reduce");
        })) == "");
}

TEST_CASE("a split orders ranks by key, then by rank, and leaves out ranks without a color", "[standin]") {
  auto const id = new_identifier();
  CHECK(failures(in_processes(4, [&](int rank) {
          Rank const r(id, rank, 4, rank);
          ncclComm_t part = nullptr;
          check(ncclCommSplit(r.comm, rank == 3 ? NCCL_SPLIT_NOCOLOR : 7, rank == 0 ? 1 : 0, &part, nullptr), "split");
          expect((part == nullptr) == (rank == 3), "who is in the part");
          if (part == nullptr) return;
          int place = -1, size = 0, device = -1;
          check(ncclCommUserRank(part, &place), "rank");
          check(ncclCommCount(part, &size), "count");
          check(ncclCommCuDevice(part, &device), "device");
          expect(size == 3 && place == (rank + 2) % 3 && device == rank, "place in the part");
          Memory<std::int64_t> data(1);
          r.upload(data.data(), {rank});
          check(ncclAllReduce(data.data(), data.data(), 1, ncclInt64, ncclSum, part, r.stream), "all-reduce");
          expect(r.download(data.data(), 1).front() == 3, "sum of the part");
          check(ncclCommDestroy(part), "ncclCommDestroy");
        })) == "");
}

TEST_CASE("two ranks on one GPU are refused, unless they are on two machines", "[standin]") {
  auto const try_ranks = [](bool two_hosts) {
    auto const id = new_identifier();
    return in_processes(2, [&](int rank) {
      if (two_hosts) ::setenv("NCCL_HOSTID", std::to_string(rank).c_str(), 1);
      ncclComm_t comm = nullptr;
      ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
      if (ncclCommInitRankConfig(&comm, 2, id, rank, &config) == ncclInvalidUsage) {
        std::fprintf(stderr, "%s", ncclGetLastError(nullptr));
        std::_Exit(2);
      }
      check(ncclCommDestroy(comm), "ncclCommDestroy");
    });
  };
  for (auto const& ended : try_ranks(false)) {
    CHECK(ended.code == 2);
    CHECK(ended.text == "rank 0 and rank 1 are both on CUDA device 0 of one machine: NCCL wants a GPU for each rank");
  }
  CHECK(failures(try_ranks(true)) == "");
}

TEST_CASE("communicators that do not block are in progress until their ranks have come", "[standin]") {
  auto const id = new_identifier();
  CHECK(failures(in_processes(2, [&](int rank) {
          if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(300));
          Rank r(id, rank, 2, rank, 0);
          auto state = ncclSuccess;
          check(ncclCommGetAsyncError(r.comm, &state), "state");
          if (rank == 0) expect(state == ncclInProgress, "a communicator whose peer has not come");
          auto const settle = [&](ncclResult_t status) {
            expect(status == ncclInProgress, "a call that does not block");
            check(fsdp::nccl::detail::settle(status, r.comm), "settle");
          };
          settle(ncclInProgress);
          Memory<std::int64_t> data(1);
          r.upload(data.data(), {rank});
          settle(ncclAllReduce(data.data(), data.data(), 1, ncclInt64, ncclSum, r.comm, r.stream));
          expect(r.download(data.data(), 1).front() == 1, "sum");
          ncclComm_t part = nullptr;
          settle(ncclCommSplit(r.comm, 0, -rank, &part, nullptr));
          expect(part != nullptr, "split");
          settle(ncclCommFinalize(r.comm));
          check(ncclCommDestroy(part), "ncclCommDestroy");
        })) == "");
}

TEST_CASE("fsdp's communicator adopts one of NCCL's that does not block", "[standin]") {
  auto const id = new_identifier();
  CHECK(failures(in_processes(2, [&](int rank) {
          Rank const r(id, rank, 2, rank, 0);
          check(fsdp::nccl::detail::settle(ncclInProgress, r.comm), "settle");
          auto comm = fsdp::nccl::Communicator::adopt(r.comm);
          auto stream = fsdp::cuda::Stream::adopt(r.stream);
          Memory<float> data(4);
          r.upload(data.data(), std::vector<float>(4, static_cast<float>(rank)));
          comm.broadcast(stream, data.data(), 2, 1, {"unit", "test"});
          comm.all_reduce(stream, static_cast<float const*>(data.data()), data.data(), 4, {"unit", "test"});
          expect(r.download(data.data(), 4) == std::vector<float>{2, 2, 1, 1}, "values");
          expect(comm.exchange(std::to_string(rank), "ranks") == std::vector<std::string>{"0", "1"}, "exchange");
          auto part = comm.split(rank, 0, "alone");
          expect(part.size() == 1, "split");
        })) == "");
}

TEST_CASE("who makes an identifier must live until the others have come, and leaves nothing behind", "[standin]") {
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  auto const made = in_processes(1, [&](int) {
    auto const id = new_identifier();
    expect(::write(ends[1], id.internal, sizeof id.internal) == sizeof id.internal, "write");
    ::raise(SIGKILL);
  });
  CHECK(made[0].code == 128 + SIGKILL);
  ncclUniqueId id{};
  REQUIRE(::read(ends[0], id.internal, sizeof id.internal) == sizeof id.internal);
  auto const joined = in_processes(1, [&](int) {
    ncclComm_t comm = nullptr;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    expect(ncclCommInitRankConfig(&comm, 1, id, 0, &config) == ncclSystemError, "joined");
    expect(std::string(ncclGetLastError(nullptr)).find("is gone") != std::string::npos, ncclGetLastError(nullptr));
  });
  CHECK(failures(joined) == "");
  ::close(ends[0]);
  ::close(ends[1]);
}

TEST_CASE("a lost peer is waited for, or told of as FSDP_STANDIN_NCCL_LOST_PEER says; an abort frees the stream",
          "[standin]") {
  for (bool const notice : {false, true}) {
    auto const id = new_identifier();
    auto const ended = in_processes(2, [&](int rank) {
      if (notice) ::setenv("FSDP_STANDIN_NCCL_LOST_PEER", "error", 1);
      Rank r(id, rank, 2, rank);
      Memory<float> data(4);
      if (rank == 1) ::raise(SIGKILL);
      check(ncclAllReduce(data.data(), data.data(), 4, ncclFloat32, ncclSum, r.comm, r.stream), "ncclAllReduce");
      auto state = ncclSuccess;
      for (int poll = 0; poll < 40 && state == ncclSuccess; ++poll) {
        std::this_thread::sleep_for(std::chrono::milliseconds(notice ? 100 : 10));
        check(ncclCommGetAsyncError(r.comm, &state), "ncclCommGetAsyncError");
      }
      expect(state == (notice ? ncclRemoteError : ncclSuccess), "the state is " + std::to_string(state));
      if (notice)
        expect(std::string(ncclGetLastError(r.comm)).find("rank 0 of 2: rank 1 (process ") == 0,
               ncclGetLastError(r.comm));
      expect(cudaStreamQuery(r.stream) == cudaErrorNotReady, "the collective ended");
      r.abort();
      r.synchronize();
    });
    CHECK(ended[0].text == "");
    CHECK(ended[0].code == 0);
    CHECK(ended[1].code == 128 + SIGKILL);
  }
}

TEST_CASE("fsdp's watch ends a rank whose peer was lost, and says what it waits in", "[standin]") {
  for (bool const notice : {false, true}) {
    auto const id = new_identifier();
    auto const ended = in_processes(2, [&](int rank) {
      if (notice) ::setenv("FSDP_STANDIN_NCCL_LOST_PEER", "error", 1);
      Rank const r(id, rank, 2, rank);
      fsdp::nccl::Options options;
      options.timeout = notice ? std::chrono::minutes(5) : std::chrono::seconds(1);
      auto comm = fsdp::nccl::Communicator::adopt(r.comm, options);
      auto stream = fsdp::cuda::Stream::adopt(r.stream);
      Memory<float> data(4);
      if (rank == 1) ::raise(SIGKILL);
      comm.all_reduce(stream, static_cast<float const*>(data.data()), data.data(), 4, {"block.3", "backward"});
      r.synchronize();
    });
    INFO(ended[0].text);
    CHECK(ended[0].code == fsdp::host::wait_expired_exit_code);
    CHECK(ended[0].text.find("rank 0 of 2 (cuda:0): waiting in all_reduce 1 of 4 fp32 for unit 'block.3' (backward)") !=
          std::string::npos);
    CHECK((ended[0].text.find("NCCL reports: a peer failed or is gone; rank 0 of 2: rank 1 (process ") !=
           std::string::npos) == notice);
  }
}

TEST_CASE("a communicator that fsdp's watch aborts is not called afterwards", "[standin]") {
  auto const id = new_identifier();
  auto const ended = in_processes(2, [&](int rank) {
    ::setenv("FSDP_STANDIN_NCCL_LOST_PEER", "error", 1);
    Rank const r(id, rank, 2, rank);
    auto comm = fsdp::nccl::Communicator::adopt(r.comm);
    auto stream = fsdp::cuda::Stream::adopt(r.stream);
    Memory<float> data(4);
    if (rank == 1) ::raise(SIGKILL);
    while (true) {  // goes on to enqueue, and is elsewhere when the watch ends the run
      comm.all_reduce(stream, static_cast<float const*>(data.data()), data.data(), 4, {"unit", "test"});
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  });
  INFO(ended[0].text);
  CHECK(ended[0].code == fsdp::host::wait_expired_exit_code);
  CHECK(ended[0].text.find("standin") == std::string::npos);
}

namespace {

/// Two communicators on a device each; rank 1 enqueues on them in the same order as rank 0, or in the other one. Rank
/// `impatient` gives up after a second; its peer, told that it is gone, at once after it.
std::vector<standin::test::Ended> two_communicators(bool same_order, char const* mode, char const* capacity,
                                                    int impatient = -1) {
  auto const first = new_identifier(), second = new_identifier();
  return in_processes(2, [&, same_order](int rank) {
    ::setenv("FSDP_STANDIN_NCCL", mode, 1);
    ::setenv("FSDP_STANDIN_NCCL_CAPACITY", capacity, 1);
    if (impatient >= 0) ::setenv("FSDP_STANDIN_NCCL_LOST_PEER", "error", 1);
    Rank a(first, rank, 2, rank), b(second, rank, 2, rank);
    fsdp::nccl::Options options;
    options.timeout = rank == impatient ? std::chrono::seconds(1) : std::chrono::minutes(5);
    auto comm_a = fsdp::nccl::Communicator::adopt(a.comm, options);
    auto comm_b = fsdp::nccl::Communicator::adopt(b.comm, options);
    auto stream_a = fsdp::cuda::Stream::adopt(a.stream), stream_b = fsdp::cuda::Stream::adopt(b.stream);
    Memory<float> data(2);
    a.upload(data.data(), {1, 2});
    auto const on_a = [&] {
      comm_a.all_reduce(stream_a, static_cast<float const*>(data.data()), data.data(), 1, {"unit.a", "test"});
    };
    auto const on_b = [&] {
      comm_b.all_reduce(stream_b, static_cast<float const*>(data.data() + 1), data.data() + 1, 1, {"unit.b", "test"});
    };
    if (same_order || rank == 0) {
      on_a();
      on_b();
    } else {
      on_b();
      on_a();
    }
    a.synchronize();
    b.synchronize();
    expect(a.download(data.data(), 2) == std::vector<float>{2, 4}, "sums");
  });
}
/// Whether a report of either communicator says that the rank has enqueued first's collective before second's.
bool names_order(std::string const& text, char const* first, char const* second) {
  auto const says = [&](char const* waits, char const* when, char const* other) {
    auto const at = text.find(fsdp::formatted(": waiting in all_reduce 1 of 1 fp32 for unit '{}' (test), for ", waits));
    auto const line = at == std::string::npos ? std::string() : text.substr(at, text.find('\n', at) - at);
    return line.find(fsdp::formatted("; this rank also waits {} in all_reduce 1 of 1 fp32 for unit '{}' (test)", when,
                                     other)) != std::string::npos;
  };
  return says(first, "since then", second) || says(second, "for longer", first);
}

}  // namespace

TEST_CASE("one order over communicators never hangs; two orders do where a device has room for one", "[standin]") {
  CHECK(failures(two_communicators(true, "serial", "")) == "");
  CHECK(failures(two_communicators(true, "seeded", "2")) == "");
  CHECK(failures(two_communicators(false, "seeded", "2")) == "");
  // One rank at a time: its abort lets its device go on with the other collective, which may end its peer's wait in it.
  for (int const rank : {0, 1}) {
    auto const ended = two_communicators(false, "serial", "", rank);
    auto const& text = ended[static_cast<std::size_t>(rank)].text;
    INFO(text);
    for (auto const& each : ended) CHECK(each.code == fsdp::host::wait_expired_exit_code);
    CHECK((names_order(text, "unit.a", "unit.b") == (rank == 0)));
    CHECK((names_order(text, "unit.b", "unit.a") == (rank == 1)));
  }
}

namespace {

/// Two communicators on a device each, which has room for one collective. Both ranks enqueue on both in one order. A
/// hold keeps rank 0's stream of the second communicator, and rank 1's of the first, until another collective is under
/// way on the device: for 100 ms, or without a limit where the test expects ranks that wait for each other.
std::vector<standin::test::Ended> started_crosswise(std::vector<std::pair<char const*, char const*>> const& variables,
                                                    bool without_limit) {
  auto const first = new_identifier(), second = new_identifier();
  return in_processes(2, [&](int rank) {
    ::setenv("FSDP_STANDIN_NCCL", "seeded", 1);
    ::setenv("FSDP_STANDIN_NCCL_CAPACITY", "1", 1);
    for (auto const& [name, value] : variables) ::setenv(name, value, 1);
    Rank a(first, rank, 2, rank), b(second, rank, 2, rank);
    fsdp::nccl::Options options;
    options.timeout = without_limit ? std::chrono::seconds(1) : std::chrono::minutes(5);
    auto comm_a = fsdp::nccl::Communicator::adopt(a.comm, options);
    auto comm_b = fsdp::nccl::Communicator::adopt(b.comm, options);
    auto stream_a = fsdp::cuda::Stream::adopt(a.stream), stream_b = fsdp::cuda::Stream::adopt(b.stream);
    Memory<float> data(2);
    a.upload(data.data(), {1, 2});
    auto const until = std::chrono::steady_clock::now() + std::chrono::milliseconds(100);
    auto const hold = [=] {
      standin::Unseen const unseen;
      return standin::nccl::Occupancy::of(rank).needed() > 0 ||
             (!without_limit && std::chrono::steady_clock::now() > until);
    };
    check(standin::enqueue(rank == 0 ? b.stream : a.stream, "a hold", hold), "hold");
    comm_a.all_reduce(stream_a, static_cast<float const*>(data.data()), data.data(), 1, {"unit.a", "test"});
    comm_b.all_reduce(stream_b, static_cast<float const*>(data.data() + 1), data.data() + 1, 1, {"unit.b", "test"});
    a.synchronize();
    b.synchronize();
    expect(a.download(data.data(), 2) == std::vector<float>{2, 4}, "sums");
  });
}

}  // namespace

TEST_CASE("collectives of several communicators start in the host's order, by NCCL or by events", "[standin]") {
  for (char const* const seed : {"1", "2", "3"}) {
    CHECK(failures(started_crosswise({{"FSDP_STANDIN_SEED", seed}}, false)) == "");
    CHECK(failures(started_crosswise({{"FSDP_STANDIN_SEED", seed}, {"FSDP_STANDIN_NCCL_VERSION", "22505"}}, false)) ==
          "");
  }
  // Without an order each rank starts what the other has not started, and both wait.
  for (char const* const version : {"22605", "22505"}) {
    auto const ended =
        started_crosswise({{"NCCL_LAUNCH_ORDER_IMPLICIT", "0"}, {"FSDP_STANDIN_NCCL_VERSION", version}}, true);
    INFO(ended[0].text);
    for (auto const& each : ended) CHECK(each.code == fsdp::host::wait_expired_exit_code);
  }
}

TEST_CASE("a seeded device says how many collectives were under way at once", "[standin]") {
  auto const id = new_identifier(), other = new_identifier();
  auto const ended = in_processes(2, [&](int rank) {
    ::setenv("FSDP_STANDIN_NCCL", "seeded", 1);
    {
      Rank a(id, rank, 2, rank), b(other, rank, 2, rank);
      Memory<float> data(2);
      a.upload(data.data(), {1, 2});
      if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(300));
      check(ncclAllReduce(data.data(), data.data(), 1, ncclFloat32, ncclSum, a.comm, a.stream), "a");
      if (rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(200));
      check(ncclAllReduce(data.data() + 1, data.data() + 1, 1, ncclFloat32, ncclSum, b.comm, b.stream), "b");
      a.synchronize();
      b.synchronize();
    }
    std::exit(0);  // what is said at the end
  });
  INFO(ended[0].text);
  CHECK(ended[0].code == 0);
  CHECK(ended[0].text.find("standin: at most 2 collectives of NCCL were under way at once on device 0") !=
        std::string::npos);
}
