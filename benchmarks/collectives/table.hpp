// SPDX-License-Identifier: Apache-2.0
// Measures collectives, over any communicator and element type.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "fsdp/concepts.hpp"
#include "fsdp/error.hpp"
#include "peers.hpp"
#include "plain.hpp"
#include "report.hpp"
#include "settings.hpp"
#include "timing.hpp"

namespace bench {

/// How many elements a collective of a size moves.
struct Extent {
  std::size_t count = 0;  ///< per rank for all_gather and reduce_scatter, of all for all_reduce
  std::size_t sent = 0, received = 0;

  /// @param elements of the total size, rounded down to what ranks can share
  Extent(Collective collective, std::size_t elements, std::size_t ranks) {
    bool const whole = collective == Collective::all_reduce;
    count = whole ? elements : elements / ranks;
    sent = collective == Collective::all_gather ? count : whole ? count : count * ranks;
    received = collective == Collective::reduce_scatter ? count : whole ? count : count * ranks;
  }
  std::size_t total() const { return std::max(sent, received); }
};

/// Element `i` of rank `rank`'s input: an integer so small that sums over 64 ranks are exact in bf16.
inline int value_of(int rank, std::size_t i) {
  return static_cast<int>((((i * 2654435761u) >> 13) + static_cast<std::size_t>(rank) * 5 + (i >> 7)) & 3u);
}

/// Collectives of other libraries, for comparison; none by default. vendor_mpi.hpp has MPI's.
struct NoVendor {
  template <class T>
  static constexpr bool supports(Collective) {
    return false;
  }
  template <class T>
  void run(Collective, T const*, T*, std::size_t) {}
};

template <fsdp::Communicator C, class T, class Vendor = NoVendor>
class Table {
 public:
  using Device = typename C::Device;
  using Stream = typename Device::Stream;

  Table(C& comm, Settings const& settings, Report& report)
      : comm_(comm),
        settings_(settings),
        report_(report),
        ranks_(static_cast<std::size_t>(comm.size())),
        self_(static_cast<std::size_t>(comm.rank())),
        stream_(comm.device().make_stream("collectives", fsdp::StreamPriority::high)),
        send_(comm, stream_, std::max(settings.pool_bytes, settings.max_bytes)),
        receive_(comm, stream_, std::max(settings.pool_bytes, settings.max_bytes)),
        watch_(comm),
        plain_(comm.device()) {
    if (!settings.compare) return;
    send_peers_ = peers_of(comm, send_, settings.comm);
    receive_peers_ = peers_of(comm, receive_, settings.comm);
    reaches_peers_ = !send_peers_.empty() && !receive_peers_.empty();
    if (!reaches_peers_) {  // the same traffic, in this rank's own memory
      send_peers_.assign(ranks_, send_.data());
      receive_peers_.assign(ranks_, receive_.data());
    }
  }

  /// @note Collective: yes.
  void run() {
    for (auto const collective : settings_.collectives) {
      report_.begin(collective, describe_plain(collective, reaches_peers_));
      for (auto const bytes : settings_.sizes()) measure(collective, bytes);
    }
  }

 private:
  void measure(Collective collective, std::size_t bytes) {
    Extent const extent(collective, bytes / sizeof(T), ranks_);
    if (extent.count == 0)
      fsdp::fail<fsdp::ConfigError>("{} of {} bytes over {} ranks moves nothing: -b must be {} or more",
                                    name(collective), bytes, ranks_, ranks_ * sizeof(T));
    Row row{collective, extent.total() * sizeof(T), extent.count, {}, {}};
    struct Way {
      bool in_place;
      Form& form;
    };
    for (auto const& [in_place, form] : {Way{false, row.out_of_place}, Way{true, row.in_place}}) {
      std::vector<double> ours, plains, vendors;
      bool const beside = settings_.compare && Vendor::template supports<T>(collective);
      enqueue(collective, extent, in_place, settings_.warmup);
      comm_.device().synchronize(stream_);
      for (int round = 0; round < settings_.rounds; ++round) {
        // Side by side, so that other load on the machine meets all of them.
        if (settings_.compare) {
          if (round == 0) plain(collective, extent, in_place, std::min(settings_.warmup, 2));
          plains.push_back(watch_.time([&] { plain(collective, extent, in_place, settings_.iterations); }));
        }
        ours.push_back(watch_.time([&] {
          enqueue(collective, extent, in_place, settings_.iterations);
          comm_.device().synchronize(stream_);
        }));
        if (beside) {
          if (round == 0) vendor(collective, extent, in_place, std::min(settings_.warmup, 2));
          vendors.push_back(watch_.time([&] { vendor(collective, extent, in_place, settings_.iterations); }));
        }
      }
      auto const per_call = [&](std::vector<double> const& times) {
        return median(times) / static_cast<double>(settings_.iterations);
      };
      ours = watch_.slowest(ours);
      form.time = per_call(ours);
      if (settings_.compare) {
        plains = watch_.slowest(plains);
        form.plain = per_call(plains);
        for (std::size_t round = 0; round < ours.size(); ++round) plains[round] /= ours[round];
        form.ratio = median(plains);
      }
      if (beside) form.vendor = per_call(watch_.slowest(vendors));
      if (settings_.check) form.wrong = check(collective, extent, in_place);
    }
    report_.add(row);
  }

  // --- buffers: iteration k uses place k mod places, so that a size is not timed out of caches
  static std::size_t span(Extent const& extent) { return (extent.total() * sizeof(T) + 255) / 256 * 256; }
  std::size_t places(Extent const& extent) const { return std::max<std::size_t>(1, send_.bytes() / span(extent)); }
  struct Buffers {
    T* send;
    T* receive;
  };
  /// @param base of the area that holds the data, or of a peer's view of it
  Buffers buffers(Collective collective, Extent const& extent, bool in_place, std::size_t k) const {
    auto const offset = k % places(extent) * span(extent);
    auto* const send = reinterpret_cast<T*>(send_.data() + offset);
    auto* const receive = reinterpret_cast<T*>(receive_.data() + offset);
    if (!in_place) return {send, receive};
    switch (collective) {
      case Collective::all_gather: return {receive + self_ * extent.count, receive};
      case Collective::reduce_scatter: return {send, send + self_ * extent.count};
      case Collective::all_reduce: return {receive, receive};
    }
    return {};
  }
  /// A peer's place of what is `mine` here.
  T* peers(T const* mine, std::size_t peer) const {
    auto const* const bytes = reinterpret_cast<std::byte const*>(mine);
    bool const in_send = bytes >= send_.data() && bytes < send_.data() + send_.bytes();
    auto const& area = in_send ? send_ : receive_;
    return reinterpret_cast<T*>((in_send ? send_peers_ : receive_peers_)[peer] + (bytes - area.data()));
  }

  void enqueue(Collective collective, Extent const& extent, bool in_place, int iterations) {
    constexpr std::size_t reuse = 8;
    std::array<fsdp::Ticket, reuse> tickets{};
    auto const distance = std::min(places(extent), reuse);
    for (std::size_t k = 0; k < static_cast<std::size_t>(iterations); ++k) {
      auto const at = buffers(collective, extent, in_place, next_++);
      // A buffer that peers may still read is overwritten only after a full rotation.
      if (in_place && k >= distance)
        comm_.wait_for_peers(stream_, tickets[(k - distance) % reuse], fsdp::WaitSite::none);
      tickets[k % reuse] = one(collective, extent, at);
    }
  }
  fsdp::Ticket one(Collective collective, Extent const& extent, Buffers const& at) {
    fsdp::Label const label{"buffer", "benchmark"};
    T const* const send = at.send;
    switch (collective) {
      case Collective::all_gather: return comm_.all_gather(stream_, send, at.receive, extent.count, label);
      case Collective::reduce_scatter: return comm_.reduce_scatter(stream_, send, at.receive, extent.count, label);
      case Collective::all_reduce: return comm_.all_reduce(stream_, send, at.receive, extent.count, label);
    }
    return {};
  }

  void plain(Collective collective, Extent const& extent, bool in_place, int iterations) {
    std::vector<T const*> from(ranks_);
    for (int k = 0; k < iterations; ++k) {
      auto const at = buffers(collective, extent, in_place, next_++);
      switch (collective) {
        case Collective::all_gather: plain_gather(extent, in_place, at); break;
        case Collective::reduce_scatter:
          for (std::size_t r = 0; r < ranks_; ++r) from[r] = peers(at.send, r) + self_ * extent.count;
          from[self_] = at.send + self_ * extent.count;
          plain_.sum(from, at.receive, extent.count);
          break;
        case Collective::all_reduce: {
          auto const share = extent.count / ranks_;
          for (std::size_t r = 0; r < ranks_; ++r) from[r] = peers(at.send, r) + self_ * share;
          from[self_] = at.send + self_ * share;
          plain_.sum(from, at.receive + self_ * share, share);
          for (std::size_t step = 1; step < ranks_; ++step) {
            auto const r = (self_ + step) % ranks_;
            plain_.copy(at.receive + r * share, peers(at.receive, r) + r * share, share * sizeof(T));
          }
          break;
        }
      }
    }
    plain_.finish();
  }
  void plain_gather(Extent const& extent, bool in_place, Buffers const& at) {
    auto const bytes = extent.count * sizeof(T);
    for (std::size_t step = in_place ? 1 : 0; step < ranks_; ++step) {
      auto const r = (self_ + step) % ranks_;
      auto* const to = at.receive + r * extent.count;
      plain_.copy(to, in_place ? peers(to, r) : peers(at.send, r), bytes);
    }
  }

  void vendor(Collective collective, Extent const& extent, bool in_place, int iterations) {
    for (int k = 0; k < iterations; ++k) {
      auto const at = buffers(collective, extent, in_place, next_++);
      vendor_.template run<T>(collective, in_place ? nullptr : at.send,
                              in_place && collective == Collective::reduce_scatter ? at.send : at.receive,
                              extent.count);
    }
  }

  // --- the check: one run on fresh integers
  double check_one(std::vector<T> const& received, std::size_t first, Collective collective) const {
    double wrong = 0;
    for (std::size_t i = 0; i < received.size(); ++i) {
      int expected = 0;
      if (collective == Collective::all_gather) {
        auto const count = received.size() / ranks_;
        expected = value_of(static_cast<int>(i / count), i % count);
      } else {
        for (int r = 0; r < comm_.size(); ++r) expected += value_of(r, first + i);
      }
      if (static_cast<float>(received[i]) != static_cast<float>(expected)) ++wrong;
    }
    return wrong;
  }
  std::int64_t check(Collective collective, Extent const& extent, bool in_place) {
    auto const& device = comm_.device();
    auto const at = buffers(collective, extent, in_place, next_++);
    std::vector<T> poison(extent.received, T(-1.0f));
    std::vector<T> input(extent.sent);
    for (std::size_t i = 0; i < input.size(); ++i) input[i] = T(static_cast<float>(value_of(comm_.rank(), i)));
    device.copy_async(stream_, at.receive, poison.data(), poison.size() * sizeof(T));
    device.copy_async(stream_, at.send, input.data(), input.size() * sizeof(T));
    auto const ticket = one(collective, extent, at);
    device.copy_async(stream_, poison.data(), at.receive, poison.size() * sizeof(T));
    comm_.wait_for_peers(stream_, ticket, fsdp::WaitSite::none);
    device.synchronize(stream_);
    auto const first = collective == Collective::reduce_scatter ? self_ * extent.count : 0;
    return static_cast<std::int64_t>(watch_.sum({check_one(poison, first, collective)}).front());
  }

  C& comm_;
  Settings const& settings_;
  Report& report_;
  std::size_t ranks_, self_;
  Stream stream_;
  Area<C> send_, receive_;
  Stopwatch<C> watch_;
  Plain<Device> plain_;
  Vendor vendor_;
  std::vector<std::byte*> send_peers_, receive_peers_;
  bool reaches_peers_ = false;
  std::size_t next_ = 0;
};

/// Runs `body.template operator()<T>()` for the element type that the command line names.
template <class Body>
void with_type(std::string const& type, Body&& body) {
  if (type == "float") return body.template operator()<float>();
  if (type == "double") return body.template operator()<double>();
  if (type == "bfloat16") return body.template operator()<fsdp::bf16>();
  if (type == "half") return body.template operator()<fsdp::fp16>();
}

}  // namespace bench
