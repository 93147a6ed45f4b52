// SPDX-License-Identifier: Apache-2.0
// Single collectives during matrix products: the time that they add, and the slowdown of the products.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "compute.hpp"
#include "fsdp/concepts.hpp"
#include "peers.hpp"
#include "report.hpp"
#include "table.hpp"
#include "timing.hpp"

namespace bench {

/// fp32, in place. As much compute as the communication takes alone, so that either could hide the other.
template <fsdp::Communicator C>
class Overlap {
 public:
  using Device = typename C::Device;
  using Stream = typename Device::Stream;

  Overlap(C& comm, Settings const& settings, Report& report)
      : comm_(comm),
        settings_(settings),
        report_(report),
        stream_(comm.device().make_stream("collectives", fsdp::StreamPriority::high)),
        compute_(comm.device().make_stream("compute", fsdp::StreamPriority::normal)),
        buffer_(comm, stream_, std::max(settings.pool_bytes, settings.max_bytes)),
        watch_(comm),
        products_(comm.device(), compute_, settings.rows, settings.width) {}

  /// @note Collective: yes.
  void run() {
    report_.begin_overlap(describe_compute<Device>(settings_) + ", as many as take the time of the collectives");
    for (auto const collective : settings_.collectives)
      for (auto const bytes : settings_.sizes()) measure(collective, bytes);
  }

 private:
  void measure(Collective collective, std::size_t bytes) {
    Extent const extent(collective, bytes / sizeof(float), static_cast<std::size_t>(comm_.size()));
    if (extent.count == 0)
      fsdp::fail<fsdp::ConfigError>("{} of {} bytes has no elements to move; use a larger size", name(collective),
                                    bytes);
    auto const time_comm = [&] {
      return watch_.time([&] {
        communicate(collective, extent);
        comm_.device().synchronize(stream_);
      });
    };
    static_cast<void>(time_comm());
    auto const goal = watch_.slowest({time_comm()}).front();
    int const products = calibrate(goal);
    std::vector<double> comm, compute, both, beside;
    for (int round = 0; round < settings_.rounds; ++round) {
      comm.push_back(time_comm());
      compute.push_back(watch_.time([&] {
        multiply(products);
        comm_.device().synchronize(compute_);
      }));
      double computed = 0;
      both.push_back(watch_.time([&] {
        auto const begin = now_ns();
        multiply(products);
        communicate(collective, extent);
        comm_.device().synchronize(compute_);
        computed = static_cast<double>(now_ns() - begin) * 1e-9;
        comm_.device().synchronize(stream_);
      }));
      beside.push_back(computed);
    }
    auto const per_call = [&](std::vector<double> const& times) {
      return median(watch_.slowest(times)) / static_cast<double>(settings_.iterations);
    };
    OverlapRow row;
    row.what = name(collective);
    row.bytes = extent.total() * sizeof(float);
    row.comm = per_call(comm);
    row.compute = per_call(compute);
    row.overlapped = per_call(both);
    row.compute_beside = per_call(beside);
    report_.add(row);
  }

  void communicate(Collective collective, Extent const& extent) {
    auto const total = (extent.total() * sizeof(float) + 255) / 256 * 256;
    fsdp::Label const label{"buffer", "benchmark"};
    fsdp::Ticket ticket;
    for (int k = 0; k < settings_.iterations; ++k) {
      // Rotating, so that a size is not timed out of caches.
      auto* const data = reinterpret_cast<float*>(buffer_.data() + next_++ % (buffer_.bytes() / total) * total);
      auto* const own = data + static_cast<std::size_t>(comm_.rank()) * extent.count;
      comm_.wait_for_peers(stream_, ticket, fsdp::WaitSite::none);
      switch (collective) {
        case Collective::all_gather:
          ticket = comm_.all_gather(stream_, static_cast<float const*>(own), data, extent.count, label);
          break;
        case Collective::reduce_scatter:
          ticket = comm_.reduce_scatter(stream_, static_cast<float const*>(data), own, extent.count, label);
          break;
        case Collective::all_reduce:
          ticket = comm_.all_reduce(stream_, static_cast<float const*>(data), data, extent.count, label);
          break;
      }
    }
  }
  void multiply(int products) {
    for (int i = 0; i < products; ++i) products_.forward(compute_, products_.weight());
  }
  /// The number of products that take `seconds`, agreed on by all ranks.
  int calibrate(double seconds) {
    multiply(2);
    comm_.device().synchronize(compute_);
    int const trial = 20;
    auto const one = watch_
                         .slowest({watch_.time([&] {
                           multiply(trial);
                           comm_.device().synchronize(compute_);
                         })})
                         .front() /
                     trial;
    return std::max(1, static_cast<int>(seconds / one + 0.5));
  }

  C& comm_;
  Settings const& settings_;
  Report& report_;
  Stream stream_, compute_;
  Area<C> buffer_;
  Stopwatch<C> watch_;
  Products<Device> products_;
  std::size_t next_ = 0;
};

}  // namespace bench
