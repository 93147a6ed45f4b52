// SPDX-License-Identifier: Apache-2.0
// The contract of a communicator: one suite, instantiated per model by FSDP_COMMUNICATOR_SUITE.
#pragma once

#include <fmt/format.h>

#include <atomic>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fsdp/communicator.hpp"
#include "tests/catch.hpp"
#include "tests/conformance/values.hpp"
#include "tests/support/devices.hpp"

// A fixture says how to run a model:
//
//   struct Fixture {
//     using Communicator = ...;
//     static constexpr bool fixed_tree = true;     // sums run in the pairwise tree over ranks, bitwise
//     static constexpr bool reports_order = true;  // ranks that disagree all get an OrderError, and run() still
//     returns static constexpr bool reports_peers = true;  // ranks that wait for a rank that threw get a PeerError
//     naming it static std::vector<int> sizes();             // the numbers of ranks that can be run here
//     // Calls body(Communicator&) on `ranks` ranks, each time with fresh communicators; rethrows what the first rank
//     // that failed threw. Processes that are not among the ranks return at once.
//     template <class Body> static void run(int ranks, Body const& body);
//   };
//
// Only operations of the concepts are used, so a suite runs on device memory as it runs on the host.

namespace fsdp::conformance {

/// A rank's communicator, one stream for its collectives, and the device.
template <class C>
struct Rank {
  using Device = typename C::Device;
  using Stream = typename Device::Stream;
  using Event = typename Device::Event;

  explicit Rank(C& c)
      : comm(c),
        device(c.device()),
        stream(device.make_stream("collectives", StreamPriority::high)),
        rank(c.rank()),
        size(c.size()) {}

  C& comm;
  Device device;
  Stream stream;
  int rank, size;

  std::size_t slot(int peer, std::size_t count) const { return static_cast<std::size_t>(peer) * count; }
};

inline std::vector<std::size_t> small_counts() { return {0, 1, 2, 3, 13, 64, 127, 1009}; }
inline std::vector<std::size_t> large_counts() { return {4096, 65537, 262147}; }

/// Calls `action` with a value of every element type.
template <class Action>
void for_every_type(Action const& action) {
  action(float{});
  action(double{});
  action(bf16{});
  action(fp16{});
  action(std::int64_t{});
}

template <class Fixture>
struct CommunicatorSuite {
  using C = typename Fixture::Communicator;
  using D = typename C::Device;
  using R = Rank<C>;
  static constexpr Label label{"unit", "test"};

  static_assert(fsdp::Communicator<C>);

  template <class Body>
  static void on_ranks(Body const& body) {
    for (int const ranks : Fixture::sizes())
      Fixture::run(ranks, [&](C& comm) {
        R rank(comm);
        expect(rank.size == ranks, "size() is {}, expected {}", rank.size, ranks);
        body(rank);
      });
  }

  // ---- values

  template <class T, class Value>
  static void check_all_gather(R& r, std::size_t count, bool in_place, Value const& value) {
    Buffer<T, C> recv(r.comm, count * static_cast<std::size_t>(r.size));
    Buffer<T, C> apart(r.comm, count);
    T* const send = in_place ? recv.data() + r.slot(r.rank, count) : apart.data();
    std::vector<T> mine(count), expected;
    for (std::size_t i = 0; i < count; ++i) mine[i] = value(r.rank, i);
    for (int peer = 0; peer < r.size; ++peer) {
      for (std::size_t i = 0; i < count; ++i) expected.push_back(value(peer, i));
    }
    r.device.zero_async(r.stream, recv.data(), recv.size() * sizeof(T));
    upload(r.device, r.stream, send, mine);
    auto const ticket = r.comm.all_gather(r.stream, static_cast<T const*>(send), recv.data(), count, label);
    auto const what = fmt::format("rank {} of {}: all_gather of {} {}, in place: {}", r.rank, r.size, count,
                                  fsdp::name(dtype_of<T>), in_place);
    expect_equal(download(r.device, r.stream, recv.data(), recv.size()), expected, what);
    expect_equal(download(r.device, r.stream, send, count), mine, what + ", input");
    r.comm.wait_for_peers(r.stream, ticket, WaitSite::none);
    r.device.synchronize(r.stream);
  }

  template <class T, class Value>
  static void check_reduce_scatter(R& r, std::size_t count, bool in_place, Value const& value) {
    Buffer<T, C> send(r.comm, count * static_cast<std::size_t>(r.size));
    Buffer<T, C> apart(r.comm, count);
    T* const recv = in_place ? send.data() + r.slot(r.rank, count) : apart.data();
    std::vector<T> mine(send.size()), expected(count);
    for (std::size_t i = 0; i < mine.size(); ++i) mine[i] = value(r.rank, i);
    for (std::size_t i = 0; i < count; ++i) expected[i] = sum_over_ranks<T>(r, r.slot(r.rank, count) + i, value);
    upload(r.device, r.stream, send.data(), mine);
    auto const ticket = r.comm.reduce_scatter(r.stream, static_cast<T const*>(send.data()), recv, count, label);
    auto const what = fmt::format("rank {} of {}: reduce_scatter of {} {}, in place: {}", r.rank, r.size, count,
                                  fsdp::name(dtype_of<T>), in_place);
    expect_equal(download(r.device, r.stream, recv, count), expected, what);
    if (!in_place) expect_equal(download(r.device, r.stream, send.data(), mine.size()), mine, what + ", input");
    r.comm.wait_for_peers(r.stream, ticket, WaitSite::none);
    r.device.synchronize(r.stream);
  }

  /// @param mean  all_reduce_mean, of those that have it
  template <class T, class Value>
  static void check_all_reduce(R& r, std::size_t count, bool in_place, Value const& value, bool mean = false) {
    if constexpr (TakesMeans<C>)
      if (mean && !takes_means(r.comm)) return;
    Buffer<T, C> recv(r.comm, count);
    Buffer<T, C> apart(r.comm, count);
    T* const send = in_place ? recv.data() : apart.data();
    std::vector<T> mine(count), expected(count);
    for (std::size_t i = 0; i < count; ++i) mine[i] = value(r.rank, i);
    for (std::size_t i = 0; i < count; ++i) expected[i] = sum_over_ranks<T>(r, i, value);
    upload(r.device, r.stream, send, mine);
    Ticket ticket;
    if constexpr (TakesMeans<C> && std::is_same_v<T, float>)
      if (mean) {
        for (auto& sum : expected) sum *= 1.0f / static_cast<float>(r.size);
        ticket = r.comm.all_reduce_mean(r.stream, static_cast<T const*>(send), recv.data(), count, label);
      }
    if (!mean) ticket = r.comm.all_reduce(r.stream, static_cast<T const*>(send), recv.data(), count, label);
    auto const what = fmt::format("rank {} of {}: all_reduce{} of {} {}, in place: {}", r.rank, r.size,
                                  mean ? "_mean" : "", count, fsdp::name(dtype_of<T>), in_place);
    expect_equal(download(r.device, r.stream, recv.data(), count), expected, what);
    if (!in_place) expect_equal(download(r.device, r.stream, send, count), mine, what + ", input");
    r.comm.wait_for_peers(r.stream, ticket, WaitSite::none);
    r.device.synchronize(r.stream);
  }

  template <class T, class Value>
  static T sum_over_ranks(R const& r, std::size_t i, Value const& value) {
    return tree_sum<T>(r.size, [&](int peer) { return value(peer, i); });
  }

  /// Exact sums: every order of addition gives them.
  template <class T>
  struct Small {
    std::uint64_t salt;
    T operator()(int rank, std::size_t i) const { return small<T>(rank, i, salt); }
  };
  template <class T>
  struct Rough {
    std::uint64_t salt;
    T operator()(int rank, std::size_t i) const { return rough<T>(rank, i, salt); }
  };

  template <class Check>
  static void values(Check const& check) {
    on_ranks([&](R& r) {
      std::uint64_t salt = 1;
      for (auto const count : small_counts()) {
        for (bool const in_place : {false, true}) {
          for_every_type([&](auto type) { check(r, type, count, in_place, ++salt); });
        }
      }
      for (auto const count : large_counts()) {
        check(r, float{}, count, true, ++salt);
        check(r, bf16{}, count, false, ++salt);
        check(r, fp16{}, count, true, ++salt);
      }
    });
  }
  static void all_gather() {
    values([](R& r, auto type, std::size_t count, bool in_place, std::uint64_t salt) {
      check_all_gather<decltype(type)>(r, count, in_place, Small<decltype(type)>{salt});
    });
  }
  static void reduce_scatter() {
    values([](R& r, auto type, std::size_t count, bool in_place, std::uint64_t salt) {
      check_reduce_scatter<decltype(type)>(r, count, in_place, Small<decltype(type)>{salt});
    });
  }
  static void all_reduce() {
    values([](R& r, auto type, std::size_t count, bool in_place, std::uint64_t salt) {
      check_all_reduce<decltype(type)>(r, count, in_place, Small<decltype(type)>{salt});
      if constexpr (TakesMeans<C> && std::is_same_v<decltype(type), float>)
        check_all_reduce<float>(r, count, in_place, Small<float>{salt}, true);
    });
  }
  static void broadcast() {
    on_ranks([](R& r) {
      std::uint64_t salt = 100;
      for (auto const count : small_counts()) {
        for (int root = 0; root < r.size; ++root) {
          for_every_type([&](auto type) { check_broadcast<decltype(type)>(r, count, root, ++salt); });
        }
      }
      check_broadcast<float>(r, 262147, r.size - 1, ++salt);
    });
  }
  template <class T>
  static void check_broadcast(R& r, std::size_t count, int root, std::uint64_t salt) {
    Buffer<T, C> data(r.comm, count);
    std::vector<T> mine(count), expected(count);
    for (std::size_t i = 0; i < count; ++i) mine[i] = small<T>(r.rank, i, salt);
    for (std::size_t i = 0; i < count; ++i) expected[i] = small<T>(root, i, salt);
    upload(r.device, r.stream, data.data(), mine);
    auto const ticket = r.comm.broadcast(r.stream, data.data(), count, root, label);
    expect_equal(download(r.device, r.stream, data.data(), count), expected,
                 fmt::format("rank {} of {}: broadcast of {} from {}", r.rank, r.size, count, root));
    r.comm.wait_for_peers(r.stream, ticket, WaitSite::none);
    r.device.synchronize(r.stream);
  }

  /// Inexact values pin the order of addition, bit for bit.
  static void tree_order() {
    if constexpr (Fixture::fixed_tree) {
      on_ranks([](R& r) {
        std::uint64_t salt = 1000;
        for (std::size_t const count : {1u, 129u, 1009u, 20011u}) {
          for (bool const in_place : {false, true}) {
            check_reduce_scatter<float>(r, count, in_place, Rough<float>{++salt});
            check_reduce_scatter<double>(r, count, in_place, Rough<double>{++salt});
            check_reduce_scatter<bf16>(r, count, in_place, Rough<bf16>{++salt});
            check_reduce_scatter<fp16>(r, count, in_place, Rough<fp16>{++salt});
            check_all_reduce<float>(r, count, in_place, Rough<float>{++salt});
            if constexpr (TakesMeans<C>) check_all_reduce<float>(r, count, in_place, Rough<float>{++salt}, true);
            check_all_reduce<double>(r, count, in_place, Rough<double>{++salt});
            check_all_reduce<bf16>(r, count, in_place, Rough<bf16>{++salt});
            check_all_reduce<fp16>(r, count, in_place, Rough<fp16>{++salt});
          }
        }
      });
    }
  }

  // ---- streams and reuse

  /// Fills `data` with small values, as work of a stream.
  struct Fill {
    template <class Block>
    FSDP_HD void operator()(Block const& block, std::int64_t, float* data, std::int64_t n, std::int64_t first) const {
      for (std::int64_t i = block.thread(); i < n; i += block.threads()) data[i] = static_cast<float>((first + i) % 64);
    }
  };
  /// Adds up `data`, as work of a stream; the sum shows whether the data were there in time.
  struct Add {
    template <class Block>
    FSDP_HD void operator()(Block const& block, std::int64_t, float const* data, std::int64_t n, double* total) const {
      if (block.thread() != 0) return;
      double sum = 0;
      for (std::int64_t i = 0; i < n; ++i) sum += static_cast<double>(data[i]) * static_cast<double>(i % 7 + 1);
      *total = sum;
    }
  };
  static double weighted(std::int64_t i, double value) { return value * static_cast<double>(i % 7 + 1); }

  /// Gathers and reductions on two communicators at once, back to back over two buffers each, with seeded delays in
  /// every stream; buffers are filled again as soon as wait_for_peers allows it.
  static void back_to_back() {
    on_ranks([](R& r) {
      for (std::uint64_t seed = 1; seed <= 3; ++seed) overlapped(r, seed);
    });
  }
  static void overlapped(R& r, std::uint64_t seed) {
    constexpr int rounds = 24;
    constexpr std::int64_t count = 515;
    auto const ranks = static_cast<std::int64_t>(r.size);
    auto const full = static_cast<std::size_t>(count * ranks);
    testing::Draws draws(seed * 977 + static_cast<std::uint64_t>(r.rank));
    auto gathers = r.comm.split(0, r.rank, "gathers");
    auto reductions = r.comm.split(0, r.rank, "reductions");
    auto gather = r.device.make_stream("gather", StreamPriority::high);
    auto reduce = r.device.make_stream("reduce", StreamPriority::high);
    auto compute = r.device.make_stream("compute", StreamPriority::normal);
    Buffer<float, C> slot_a(r.comm, full), slot_b(r.comm, full), slot_c(r.comm, full), slot_d(r.comm, full);
    Buffer<double, C> totals(r.comm, 2 * rounds);
    float* const gathered[2] = {slot_a.data(), slot_b.data()};
    float* const reduced[2] = {slot_c.data(), slot_d.data()};
    Ticket gather_ticket[2], reduce_ticket[2];
    auto filled = r.device.make_event(), done = r.device.make_event();
    typename R::Event read[2] = {r.device.make_event(), r.device.make_event()};
    typename R::Event scattered[2] = {r.device.make_event(), r.device.make_event()};
    auto const pause = [&](typename R::Stream& stream) {
      if (draws(3) == 0) testing::delay(r.device, stream, draws(300));
    };
    for (int round = 0; round < rounds; ++round) {
      int const slot = round % 2;
      // Gather: the slot is free when compute has read it here and peers have read this rank's slice.
      pause(gather);
      if (round >= 2) r.device.wait(gather, read[slot], WaitSite::none);
      gathers.wait_for_peers(gather, gather_ticket[slot], WaitSite::none);
      float* const own = gathered[slot] + r.rank * count;
      r.device.launch(gather, std::int64_t{1}, Fill{}, own, count, std::int64_t{r.rank + 5 * round});
      gather_ticket[slot] = gathers.all_gather(gather, static_cast<float const*>(own), gathered[slot],
                                               static_cast<std::size_t>(count), label);
      r.device.record(done, gather);
      // Compute: reads what was gathered, writes what is to be reduced.
      r.device.wait(compute, done, WaitSite::none);
      pause(compute);
      r.device.launch(compute, std::int64_t{1}, Add{}, static_cast<float const*>(gathered[slot]), count * ranks,
                      totals.data() + 2 * round);
      r.device.record(read[slot], compute);
      if (round >= 2) r.device.wait(compute, scattered[slot], WaitSite::none);
      reductions.wait_for_peers(compute, reduce_ticket[slot], WaitSite::none);
      r.device.launch(compute, std::int64_t{1}, Fill{}, reduced[slot], count * ranks, std::int64_t{3 * r.rank + round});
      r.device.record(filled, compute);
      // Reduce: in place, and reads the result.
      r.device.wait(reduce, filled, WaitSite::none);
      pause(reduce);
      float* const share = reduced[slot] + r.rank * count;
      reduce_ticket[slot] = reductions.reduce_scatter(reduce, static_cast<float const*>(reduced[slot]), share,
                                                      static_cast<std::size_t>(count), label);
      r.device.launch(reduce, std::int64_t{1}, Add{}, static_cast<float const*>(share), count,
                      totals.data() + 2 * round + 1);
      r.device.record(scattered[slot], reduce);
    }
    r.device.synchronize(gather);
    r.device.synchronize(compute);
    r.device.synchronize(reduce);
    auto const got = download(r.device, compute, totals.data(), totals.size());
    for (int round = 0; round < rounds; ++round) {
      double gather_total = 0, reduce_total = 0;
      for (int peer = 0; peer < r.size; ++peer) {
        for (std::int64_t i = 0; i < count; ++i) {
          gather_total += weighted(peer * count + i, static_cast<double>((peer + 5 * round + i) % 64));
          reduce_total += weighted(i, static_cast<double>((3 * peer + round + r.rank * count + i) % 64));
        }
      }
      auto const at = static_cast<std::size_t>(2 * round);
      expect(got[at] == gather_total, "rank {}: round {}, seed {}: gathered {}, expected {}", r.rank, round, seed,
             got[at], gather_total);
      expect(got[at + 1] == reduce_total, "rank {}: round {}, seed {}: reduced {}, expected {}", r.rank, round, seed,
             got[at + 1], reduce_total);
    }
    gathers.wait_for_peers(gather, gather_ticket[0], WaitSite::none);
    gathers.wait_for_peers(gather, gather_ticket[1], WaitSite::none);
    reductions.wait_for_peers(reduce, reduce_ticket[0], WaitSite::none);
    reductions.wait_for_peers(reduce, reduce_ticket[1], WaitSite::none);
    r.device.synchronize(gather);
    r.device.synchronize(reduce);
  }

  /// A collective that is complete on one rank says that all peers have ended the one before it: its input is filled
  /// again without wait_for_peers. With seeded delays, on one stream.
  static void order_among_peers() {
    on_ranks([](R& r) {
      if (fsdp::order_among_peers(r.comm))
        for (std::uint64_t seed = 1; seed <= 3; ++seed) refilled(r, seed);
    });
  }
  static void refilled(R& r, std::uint64_t seed) {
    constexpr int rounds = 24;
    constexpr std::int64_t count = 515;
    auto const ranks = static_cast<std::int64_t>(r.size);
    testing::Draws draws(seed * 331 + static_cast<std::uint64_t>(r.rank));
    Buffer<float, C> one(r.comm, static_cast<std::size_t>(count * ranks)), other(r.comm, one.size());
    Buffer<double, C> totals(r.comm, rounds);
    float* const buffers[2] = {one.data(), other.data()};
    Ticket last[2];
    for (int round = 0; round < rounds; ++round) {
      float* const data = buffers[round % 2];
      float* const own = data + r.rank * count;
      if (draws(3) == 0) testing::delay(r.device, r.stream, draws(300));
      // Peers read this buffer two collectives ago.
      r.device.launch(r.stream, std::int64_t{1}, Fill{}, data, count * ranks, std::int64_t{3 * r.rank + round});
      auto const elements = static_cast<std::size_t>(count);
      auto const* const from = static_cast<float const*>(round % 3 == 0 ? own : data);
      last[round % 2] = round % 3 == 0   ? r.comm.all_gather(r.stream, from, data, elements, label)
                        : round % 3 == 1 ? r.comm.reduce_scatter(r.stream, from, own, elements, label)
                                         : r.comm.all_reduce(r.stream, from, data, elements, label);
      r.device.launch(r.stream, std::int64_t{1}, Add{}, static_cast<float const*>(round % 3 == 1 ? own : data),
                      round % 3 == 0 ? count * ranks : count, totals.data() + round);
    }
    auto const got = download(r.device, r.stream, totals.data(), totals.size());
    for (int round = 0; round < rounds; ++round) {
      double expected = 0;
      for (int peer = 0; peer < r.size; ++peer) {
        for (std::int64_t i = 0; i < count; ++i) {
          auto const first = round % 3 == 0 ? peer * count : round % 3 == 1 ? r.rank * count : 0;
          auto const value = static_cast<double>((3 * peer + round + first + i) % 64);
          expected += weighted(round % 3 == 0 ? peer * count + i : i, value);
        }
      }
      expect(got[static_cast<std::size_t>(round)] == expected, "rank {}: round {}, seed {}: got {}, expected {}",
             r.rank, round, seed, got[static_cast<std::size_t>(round)], expected);
    }
    for (auto const ticket : last) r.comm.wait_for_peers(r.stream, ticket, WaitSite::none);
    r.device.synchronize(r.stream);
  }

  /// The result of a collective belongs to the caller when it is complete on the caller's stream: one rank after the
  /// other overwrites it at once, and the others receive it whole.
  static void overwritten() {
    on_ranks([](R& r) {
      int const rounds = 8 * r.size;
      constexpr std::int64_t count = 60'003;
      auto const ranks = static_cast<std::int64_t>(r.size);
      Buffer<float, C> own(r.comm, static_cast<std::size_t>(count)), received(r.comm, own.size());
      Buffer<float, C> gathered(r.comm, static_cast<std::size_t>(count * ranks));
      Buffer<double, C> totals(r.comm, static_cast<std::size_t>(2 * rounds));
      auto const elements = own.size();
      r.device.launch(r.stream, std::int64_t{1}, Fill{}, own.data(), count, std::int64_t{r.rank});
      auto const take = [&](int round, float* data, std::int64_t n, double* total) {
        if (round % r.size == r.rank)
          r.device.zero_async(r.stream, data, static_cast<std::size_t>(n) * sizeof(float));
        else
          r.device.launch(r.stream, std::int64_t{1}, Add{}, static_cast<float const*>(data), n, total);
      };
      for (int round = 0; round < rounds; ++round) {
        int const root = (round + r.size - 1) % r.size;
        auto* const total = totals.data() + 2 * round;
        r.comm.all_gather(r.stream, static_cast<float const*>(own.data()), gathered.data(), elements, label);
        take(round, gathered.data(), count * ranks, total);
        r.comm.broadcast(r.stream, root == r.rank ? own.data() : received.data(), elements, root, label);
        if (root != r.rank) take(round, received.data(), count, total + 1);
      }
      auto const got = download(r.device, r.stream, totals.data(), totals.size());
      double gather_total = 0;
      std::vector<double> broadcast_totals(static_cast<std::size_t>(r.size));  // by root
      for (int peer = 0; peer < r.size; ++peer)
        for (std::int64_t i = 0; i < count; ++i) {
          auto const value = static_cast<double>((peer + i) % 64);
          gather_total += weighted(peer * count + i, value);
          broadcast_totals[static_cast<std::size_t>(peer)] += weighted(i, value);
        }
      for (int round = 0; round < rounds; ++round) {
        if (round % r.size == r.rank) continue;
        int const root = (round + r.size - 1) % r.size;
        double const broadcast_total = broadcast_totals[static_cast<std::size_t>(root)];
        auto const at = static_cast<std::size_t>(2 * round);
        expect(got[at] == gather_total, "rank {}: round {}: gathered {}, expected {}", r.rank, round, got[at],
               gather_total);
        expect(root == r.rank || got[at + 1] == broadcast_total, "rank {}: round {}: broadcast {}, expected {}", r.rank,
               round, got[at + 1], broadcast_total);
      }
      auto const last =
          r.comm.all_reduce(r.stream, static_cast<double const*>(totals.data()), totals.data(), totals.size(), label);
      r.comm.wait_for_peers(r.stream, last, WaitSite::none);
      r.device.synchronize(r.stream);
    });
  }

  /// An all-reduce in place, again and again over one buffer: the next one must see all of the last.
  static void repeated_all_reduce() {
    on_ranks([](R& r) {
      testing::Draws draws(static_cast<std::uint64_t>(7 + r.rank));
      constexpr std::size_t count = 700;
      Buffer<double, C> data(r.comm, count);
      std::vector<double> mine(count), expected(count);
      double factor = 1;
      for (int i = 0; i < 8; ++i) factor *= static_cast<double>(r.size);
      for (std::size_t i = 0; i < count; ++i) {
        mine[i] = small<double>(r.rank, i, 5);
        expected[i] = sum_over_ranks<double>(r, i, Small<double>{5}) * factor;
      }
      upload(r.device, r.stream, data.data(), mine);
      for (int i = 0; i < 9; ++i) {
        if (draws(2) == 0) testing::delay(r.device, r.stream, draws(400));
        auto const ticket =
            r.comm.all_reduce(r.stream, static_cast<double const*>(data.data()), data.data(), count, label);
        r.comm.wait_for_peers(r.stream, ticket, WaitSite::none);
      }
      expect_equal(download(r.device, r.stream, data.data(), count), expected, "nine all_reduces");
    });
  }

  /// Tickets stay valid for as long as the communicator lives, however many collectives follow.
  static void old_tickets() {
    on_ranks([](R& r) {
      Buffer<float, C> data(r.comm, 64 * static_cast<std::size_t>(r.size));  // a part per root: no input is overwritten
      upload(r.device, r.stream, data.data(), std::vector<float>(data.size(), static_cast<float>(r.rank)));
      auto other = r.device.make_stream("other", StreamPriority::normal);
      std::vector<Ticket> tickets;
      for (int i = 0; i < 70; ++i) {
        int const root = i % r.size;
        tickets.push_back(r.comm.broadcast(r.stream, data.data() + r.slot(root, 64), 64, root, label));
        if (i % 9 == 0) {
          for (auto const ticket : tickets) r.comm.wait_for_peers(other, ticket, WaitSite::none);
        }
      }
      r.comm.wait_for_peers(other, Ticket{}, WaitSite::none);
      for (auto const ticket : tickets) r.comm.wait_for_peers(other, ticket, WaitSite::none);
      r.device.synchronize(other);
      auto const got = download(r.device, r.stream, data.data(), data.size());
      for (std::size_t i = 0; i < got.size(); ++i) {
        expect(got[i] == static_cast<float>(i / 64), "rank {}: element {} is {}", r.rank, i, got[i]);
      }
    });
  }

  /// Enqueueing returns although the stream is still busy with earlier work that only this host thread can end.
  /// Streams that take callables only.
  static void enqueue_does_not_wait() {
    on_ranks([](R& r) {
      if constexpr (requires(typename R::Stream & s) { s.enqueue([] {}); }) {
        Buffer<float, C> recv(r.comm, 8 * static_cast<std::size_t>(r.size));
        upload(r.device, r.stream, recv.data(), std::vector<float>(recv.size(), static_cast<float>(r.rank)));
        std::atomic<bool> open{false};
        r.stream.enqueue([&open] {
          while (!open.load()) std::this_thread::yield();
        });
        r.comm.all_gather(r.stream, static_cast<float const*>(recv.data() + r.slot(r.rank, 8)), recv.data(), 8, label);
        auto const ticket =
            r.comm.all_reduce(r.stream, static_cast<float const*>(recv.data()), recv.data(), recv.size(), label);
        open.store(true);
        r.comm.wait_for_peers(r.stream, ticket, WaitSite::none);
        r.device.synchronize(r.stream);
      }
    });
  }

  // ---- groups and the control plane

  static void exchange() {
    on_ranks([](R& r) {
      for (std::size_t round = 0; round < 40; ++round) {
        auto const text = [&](int rank) {
          std::size_t const length = (static_cast<std::size_t>(rank) * 37 + round) % 5 * (round == 11 ? 30000 : 11);
          return std::string(length, static_cast<char>('a' + (rank + static_cast<int>(round)) % 26));
        };
        auto const texts = r.comm.exchange(text(r.rank), "texts");
        expect(texts.size() == static_cast<std::size_t>(r.size), "exchange gave {} texts", texts.size());
        for (int peer = 0; peer < r.size; ++peer) {
          expect(texts[static_cast<std::size_t>(peer)] == text(peer), "rank {}: round {}: a wrong text of rank {}",
                 r.rank, round, peer);
        }
        auto const all = comm::ask_first_rank(r.comm, text(r.rank), "texts", [](std::vector<std::string> const& told) {
          std::string joined;
          for (auto const& one : told) joined += one + ";";
          return joined;
        });
        std::string expected;
        for (int peer = 0; peer < r.size; ++peer) expected += text(peer) + ";";
        expect(all == expected, "rank {}: round {}: a wrong answer", r.rank, round);
        expect(comm::ask_first_rank(r.comm, text(r.rank), "texts", comm::no_text).empty(), "an answer of nothing");
      }
    });
  }

  static void split() {
    on_ranks([](R& r) {
      auto whole = r.comm.split(5, r.rank, "whole");
      expect(whole.rank() == r.rank && whole.size() == r.size, "split into one group: {} of {}", whole.rank(),
             whole.size());
      auto reversed = r.comm.split(0, -r.rank, "reversed");
      expect(reversed.rank() == r.size - 1 - r.rank, "keys order ranks: {} became {}", r.rank, reversed.rank());
      auto tied = r.comm.split(0, 3, "tied");
      expect(tied.rank() == r.rank, "equal keys keep the order: {} became {}", r.rank, tied.rank());
      auto alone = r.comm.split(r.rank, 0, "alone");
      expect(alone.size() == 1 && alone.rank() == 0, "one group per rank: {} of {}", alone.rank(), alone.size());
      auto strided = r.comm.split(r.rank % 2, r.rank, "strided");
      auto halves = r.comm.split(r.rank < (r.size + 1) / 2 ? 0 : 1, r.rank, "halves");
      auto nested = halves.split(0, -halves.rank(), "nested");
      auto stream_a = r.device.make_stream("a", StreamPriority::high);
      auto stream_b = r.device.make_stream("b", StreamPriority::high);
      auto stream_c = r.device.make_stream("c", StreamPriority::high);
      Buffer<std::int64_t, C> sums(r.comm, 4);
      upload(r.device, r.stream, sums.data(), std::vector<std::int64_t>(4, 1 + 10 * r.rank));
      auto const add = [&](C& comm, typename R::Stream& stream, std::size_t i) {
        auto const ticket =
            comm.all_reduce(stream, static_cast<std::int64_t const*>(sums.data() + i), sums.data() + i, 1, label);
        comm.wait_for_peers(stream, ticket, WaitSite::none);
      };
      // The order over communicators differs between ranks where the groups differ; no group sees that.
      add(strided, stream_a, 0);
      add(nested, stream_b, 1);
      add(reversed, stream_c, 2);
      add(alone, r.stream, 3);
      r.device.synchronize(stream_a);
      r.device.synchronize(stream_b);
      r.device.synchronize(stream_c);
      std::vector<std::int64_t> expected(4, 0);
      for (int peer = 0; peer < r.size; ++peer) {
        auto const value = static_cast<std::int64_t>(1 + 10 * peer);
        bool const same_half = (peer < (r.size + 1) / 2) == (r.rank < (r.size + 1) / 2);
        if (peer % 2 == r.rank % 2) expected[0] += value;
        if (same_half) expected[1] += value;
        expected[2] += value;
        if (peer == r.rank) expected[3] += value;
      }
      expect_equal(download(r.device, r.stream, sums.data(), 4), expected, "sums over four groups");
      r.comm.exchange({}, "done");
    });
  }

  static void memory() {
    on_ranks([](R& r) {
      expect(r.comm.allocate(0) == nullptr, "allocate(0) is no nullptr");
      r.comm.deallocate(nullptr, 0);
      for (std::size_t const bytes : {1u, 255u, 256u, 70001u}) {
        void* const data = r.comm.allocate(bytes);
        expect(data != nullptr && reinterpret_cast<std::uintptr_t>(data) % 256 == 0, "{} bytes at {}", bytes, data);
        r.comm.exchange({}, "allocated");
        r.comm.deallocate(data, bytes);
      }
    });
  }

  // ---- errors

  /// Ranks that disagree about what runs next all get an error that shows both sides.
  static void order_errors() {
    if constexpr (Fixture::reports_order) {
      disagree("the operation", "reduce_scatter", [](R& r, float* data, bool odd) {
        if (odd) {
          r.comm.reduce_scatter(r.stream, static_cast<float const*>(data), data, 8, label);
        } else {
          r.comm.all_reduce(r.stream, static_cast<float const*>(data), data, 8, label);
        }
      });
      disagree("the count", "9", [](R& r, float* data, bool odd) {
        r.comm.all_reduce(r.stream, static_cast<float const*>(data), data, odd ? 9 : 8, label);
      });
      disagree("the type", "fp64", [](R& r, float* data, bool odd) {
        if (odd) {
          auto* const wide = reinterpret_cast<double*>(data);
          r.comm.all_reduce(r.stream, static_cast<double const*>(wide), wide, 8, label);
        } else {
          r.comm.all_reduce(r.stream, static_cast<float const*>(data), data, 8, label);
        }
      });
      disagree("the unit", "block.7", [](R& r, float* data, bool odd) {
        r.comm.all_reduce(r.stream, static_cast<float const*>(data), data, 8,
                          Label{odd ? "block.7" : "block.6", "test"});
      });
    }
  }
  /// Ranks that make different control calls all get an error that names both, at once, and may go on.
  static void different_control_calls() {
    on_ranks([](R& r) {
      if (r.size == 1) return;
      bool const odd = r.rank == r.size - 1;
      auto const text = expect_throws<OrderError>("a split beside an exchange", [&] {
        if (odd) {
          static_cast<void>(r.comm.split(0, r.rank, "kept group"));
        } else {
          r.comm.exchange("text", "layouts");
        }
      });
      auto const names = {fmt::format("rank {}", r.size - 1), std::string("rank 0 exchanges \"layouts\""),
                          std::string("exchanges \"split 'kept group'\"")};
      for (auto const& part : names)
        expect(text.find(part) != std::string::npos, "rank {}: no '{}' in: {}", r.rank, part, text);
    });
  }
  template <class Enqueue>
  static void disagree(std::string_view what, std::string_view shown, Enqueue const& enqueue) {
    on_ranks([&](R& r) {
      if (r.size == 1) return;
      Buffer<float, C> data(r.comm, 64 * static_cast<std::size_t>(r.size));
      upload(r.device, r.stream, data.data(), std::vector<float>(data.size(), 1.0f));
      r.comm.all_reduce(r.stream, static_cast<float const*>(data.data()), data.data(), 4, label);
      bool const odd = r.rank == r.size - 1;
      auto const text = expect_throws<OrderError>(what, [&] { enqueue(r, data.data(), odd); });
      expect(text.find(shown) != std::string::npos && text.find("all_reduce") != std::string::npos,
             "rank {}: the error about {} must show both sides: {}", r.rank, what, text);
      r.device.synchronize(r.stream);  // the collective before, which agreed, still uses the buffer
    });
  }

  static void second_stream() {
    on_ranks([](R& r) {
      Buffer<float, C> data(r.comm, 64);
      auto other = r.device.make_stream("other", StreamPriority::normal);
      upload(r.device, r.stream, data.data(), std::vector<float>(64, 1.0f));
      auto const ticket = r.comm.broadcast(r.stream, data.data(), 64, 0, label);
      expect_throws<UsageError>("a second stream", [&] { r.comm.broadcast(other, data.data(), 64, 0, label); });
      auto moved = std::move(r.stream);
      r.comm.wait_for_peers(other, ticket, WaitSite::none);
      r.comm.broadcast(moved, data.data(), 64, 0, label);
      expect_throws<UsageError>("no such root", [&] { r.comm.broadcast(moved, data.data(), 64, r.size, label); });
      expect_throws<UsageError>("a ticket from the future",
                                [&] { r.comm.wait_for_peers(other, Ticket{1000}, WaitSite::none); });
      r.device.synchronize(other);
      r.device.synchronize(moved);
      r.comm.exchange({}, "done");
    });
  }

  /// A rank that throws is named to the ranks that wait for it, whatever they wait in.
  static void peer_errors() {
    if constexpr (Fixture::reports_peers) {
      for (int const ranks : Fixture::sizes()) {
        if (ranks == 1) continue;
        for (int waits_in = 0; waits_in < 3; ++waits_in) {
          auto const what = expect_throws<ConfigError>("run() rethrows the first failure", [&] {
            Fixture::run(ranks, [&](C& comm) {
              R r(comm);
              auto const failing = r.size - 1;
              Buffer<float, C> data(comm, 64 * static_cast<std::size_t>(r.size));
              upload(r.device, r.stream, data.data(), std::vector<float>(data.size(), 1.0f));
              comm.all_gather(r.stream, static_cast<float const*>(data.data() + r.slot(r.rank, 64)), data.data(), 64,
                              label);
              if (r.rank == failing) fail<ConfigError>("a setting of rank {}", failing);
              auto const text = expect_throws<PeerError>("a wait for a rank that failed", [&] {
                if (waits_in == 0)
                  comm.all_reduce(r.stream, static_cast<float const*>(data.data()), data.data(), 64, label);
                if (waits_in == 1) comm.exchange("text", "test");
                if (waits_in == 2) static_cast<void>(comm.split(0, 0, "part"));
              });
              expect(text.find(fmt::format("rank {}", failing)) != std::string::npos, "the error names no rank: {}",
                     text);
            });
          });
          expect(what == fmt::format("a setting of rank {}", ranks - 1), "another failure was reported: {}", what);
        }
      }
    }
  }
};

}  // namespace fsdp::conformance

/// Defines the suite's test cases for one fixture; `tag` is a string like "local<host>".
#define FSDP_COMMUNICATOR_SUITE(tag, Fixture)                                                                      \
  TEST_CASE(tag ": all_gather", "[communicator]") { fsdp::conformance::CommunicatorSuite<Fixture>::all_gather(); } \
  TEST_CASE(tag ": reduce_scatter", "[communicator]") {                                                            \
    fsdp::conformance::CommunicatorSuite<Fixture>::reduce_scatter();                                               \
  }                                                                                                                \
  TEST_CASE(tag ": all_reduce", "[communicator]") { fsdp::conformance::CommunicatorSuite<Fixture>::all_reduce(); } \
  TEST_CASE(tag ": broadcast", "[communicator]") { fsdp::conformance::CommunicatorSuite<Fixture>::broadcast(); }   \
  TEST_CASE(tag ": sums run in the pairwise tree", "[communicator]") {                                             \
    fsdp::conformance::CommunicatorSuite<Fixture>::tree_order();                                                   \
  }                                                                                                                \
  TEST_CASE(tag ": buffers are reused after wait_for_peers", "[communicator]") {                                   \
    fsdp::conformance::CommunicatorSuite<Fixture>::back_to_back();                                                 \
  }                                                                                                                \
  TEST_CASE(tag ": a collective says that peers have ended the one before it", "[communicator]") {                 \
    fsdp::conformance::CommunicatorSuite<Fixture>::order_among_peers();                                            \
  }                                                                                                                \
  TEST_CASE(tag ": what a collective has written may be overwritten at once", "[communicator]") {                  \
    fsdp::conformance::CommunicatorSuite<Fixture>::overwritten();                                                  \
  }                                                                                                                \
  TEST_CASE(tag ": all_reduce over one buffer again and again", "[communicator]") {                                \
    fsdp::conformance::CommunicatorSuite<Fixture>::repeated_all_reduce();                                          \
  }                                                                                                                \
  TEST_CASE(tag ": tickets stay valid", "[communicator]") {                                                        \
    fsdp::conformance::CommunicatorSuite<Fixture>::old_tickets();                                                  \
  }                                                                                                                \
  TEST_CASE(tag ": enqueueing does not wait for device work", "[communicator]") {                                  \
    fsdp::conformance::CommunicatorSuite<Fixture>::enqueue_does_not_wait();                                        \
  }                                                                                                                \
  TEST_CASE(tag ": exchange and ask_first_rank", "[communicator]") {                                               \
    fsdp::conformance::CommunicatorSuite<Fixture>::exchange();                                                     \
  }                                                                                                                \
  TEST_CASE(tag ": split", "[communicator]") { fsdp::conformance::CommunicatorSuite<Fixture>::split(); }           \
  TEST_CASE(tag ": memory", "[communicator]") { fsdp::conformance::CommunicatorSuite<Fixture>::memory(); }         \
  TEST_CASE(tag ": ranks that disagree all get an OrderError", "[communicator]") {                                 \
    fsdp::conformance::CommunicatorSuite<Fixture>::order_errors();                                                 \
  }                                                                                                                \
  TEST_CASE(tag ": ranks that make different control calls all get an OrderError", "[communicator]") {             \
    fsdp::conformance::CommunicatorSuite<Fixture>::different_control_calls();                                      \
  }                                                                                                                \
  TEST_CASE(tag ": a second stream is a UsageError", "[communicator]") {                                           \
    fsdp::conformance::CommunicatorSuite<Fixture>::second_stream();                                                \
  }                                                                                                                \
  TEST_CASE(tag ": a rank that failed is named to its peers", "[communicator]") {                                  \
    fsdp::conformance::CommunicatorSuite<Fixture>::peer_errors();                                                  \
  }                                                                                                                \
  static_assert(true, "")
