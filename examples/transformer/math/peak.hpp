// SPDX-License-Identifier: Apache-2.0
// The peak rate of the devices, to which model FLOP utilisation (MFU) is relative.
#pragma once

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <vector>

#include "fsdp/host.hpp"
#include "fsdp/kernels.hpp"
#include "fsdp/memory.hpp"
#include "transformer/launch/machine.hpp"
#include "transformer/math/blas.hpp"
#include "transformer/math/gemm.hpp"

namespace transformer {

/// FLOP per second of all ranks together, and where the figure comes from.
struct Peak {
  double flops = 0;
  std::string source;
  double own = 0;            ///< this rank's part
  bool is_measured = false;  ///< neither given nor of a data sheet
};

/// The highest of up to five measurements, about 0.35 s in all; two within 1 % of the highest are enough.
///
/// Other work on the machine, or on the one below a virtual machine, can only lower a rate. It comes and goes within
/// tenths of a second, so measurements stand apart.
/// @param measure  a rate, measured for about 50 ms
/// @param rest     lets 20 ms pass
template <class Measure, class Rest>
double highest_rate(Measure&& measure, Rest&& rest) {
  constexpr std::size_t most = 5;
  constexpr double same = 0.99;
  std::vector<double> rates;
  double best = 0;
  auto const confirmed = [&] {
    return std::count_if(rates.begin(), rates.end(), [&](double rate) { return rate >= same * best; }) >= 2;
  };
  while (rates.size() < most && !confirmed()) {
    if (!rates.empty()) rest();
    rates.push_back(measure());
    best = std::max(best, rates.back());
  }
  return best;
}

/// Dense bf16 peak by NVIDIA's data sheets, FLOP per second; 0 for a device that is not listed, or a part of one.
///
/// The sheets of Hopper, Ada and Blackwell name the rate with structured sparsity, twice the dense one: H100 and H200
/// SXM 1,979, H100 PCIe 1,513, H100 and H200 NVL 1,671, L40S 733, L4 242, B200 4,500 TFLOP/s (989.4 is the H100
/// whitepaper's figure). Those of A100, A30 and A10 name the dense rate too: 312, 165, 125.
/// @param text  any text with the device's name as the driver gives it, such as "NVIDIA H200"
inline double data_sheet_bf16_peak(std::string_view text) {
  struct Row {
    std::string_view name;
    double teraflops;
  };
  // The longer name of two comes first.
  constexpr std::array rows{Row{"GH200", 989.4},     Row{"H200 NVL", 835.5}, Row{"H200", 989.4}, Row{"H100 NVL", 835.5},
                            Row{"H100 PCIe", 756.5}, Row{"H100", 989.4},     Row{"A100", 312},   Row{"A30", 165},
                            Row{"A10", 125},         Row{"L40S", 362},       Row{"L4", 121},     Row{"B200", 2250}};
  if (text.find("MIG") != std::string_view::npos) return 0;
  auto const in_word = [&](std::size_t at) {
    return at < text.size() && std::isalnum(static_cast<unsigned char>(text[at])) != 0;
  };
  for (auto const& row : rows) {
    for (auto at = text.find(row.name); at != std::string_view::npos; at = text.find(row.name, at + 1))
      if ((at == 0 || !in_word(at - 1)) && !in_word(at + row.name.size())) return row.teraflops * 1e12;
  }
  return 0;
}

namespace detail {

/// Highest rate of products of n by n elements of T, `at_once` of them together, FLOP per second, measured for about as
/// long as `span` says.
template <class T, class D>
double measure_products(D const& device, std::int64_t n, std::int64_t at_once = 1,
                        std::chrono::milliseconds span = usual_span) {
  using Clock = std::chrono::steady_clock;
  auto const bytes = static_cast<std::size_t>(n * n) * sizeof(T);
  fsdp::MemoryAccount account;
  fsdp::AccountedMemory<D const> const memory(device, account, fsdp::MemoryTag::workspace,
                                              static_cast<std::size_t>(2 + at_once) * bytes);
  auto stream = device.make_stream("peak", fsdp::StreamPriority::normal);
  T* const a = memory.template as<T>();
  // Not zeros, with which a GPU draws less power and runs faster than it ever does in training.
  fsdp::kernels::initialize(device, stream, a, 2 * n * n, fsdp::init::normal(1.0f), 1, fsdp::hash_name("peak"), 0);
  Gemm<D> gemm(device);
  auto const product = [&] {
    device.synchronize(stream);
    auto const start = Clock::now();
    T const* const left = a;
    T const* const right = a + n * n;
    T* const result = a + 2 * n * n;
    if (at_once == 1) {
      gemm.run(stream, Op::none, Op::none, n, n, n, 1, left, n, right, n, 0, result, n);
    } else {
      gemm.batched(stream, Op::none, Op::none, n, n, n, 1, left, n, 0, right, n, 0, 0, result, n, n * n, at_once);
    }
    device.synchronize(stream);
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  double best = product();  // also warms up
  auto const begin = Clock::now();
  while (Clock::now() - begin < span) best = std::min(best, product());
  return 2.0 * static_cast<double>(at_once * n * n * n) / best;
}

/// Rate of products that fill a GPU. On slower devices they are smaller, so that each takes less than a second.
template <class T, class D>
double measure_products(D const& device) {
  constexpr std::int64_t largest = sizeof(T) == 2 ? 8192 : 4096;
  std::int64_t n = 512;
  double rate = measure_products<T>(device, n);
  while (n < largest && 2.0 * 8 * static_cast<double>(n * n * n) < rate)  // twice the length, eight times the work
    rate = measure_products<T>(device, n *= 2);
  return rate;
}

}  // namespace detail

/// Rate of a host rank's products of T, FLOP per second, measured for about as long as `span` says.
template <class T>
double measure_host_rate(fsdp::host::Device const& device, std::chrono::milliseconds span = usual_span) {
  if constexpr (std::is_same_v<T, float>) {
    return measure_sgemm_peak(device.threads, span);
  } else {
    return detail::measure_products<T>(device, 512, device.threads, span);
  }
}
template <class T>
double highest_host_rate(fsdp::host::Device const& device) {
  return highest_rate([&] { return measure_host_rate<T>(device); },
                      [] { std::this_thread::sleep_for(std::chrono::milliseconds(20)); });
}
/// The name of the measured products in messages.
template <class T>
constexpr std::string_view host_products = std::is_same_v<T, float> ? "sgemm" : "bf16 product";

namespace detail {

/// Peak of one rank's device.
template <class T, class D>
Peak device_peak(D const& device) {
  if constexpr (std::is_same_v<D, fsdp::host::Device>) {
    return {highest_host_rate<T>(device), fmt::format("measured {} peak", host_products<T>), 0, true};
  } else {
    constexpr bool bf16 = std::is_same_v<T, fsdp::bf16>;
    if (double const listed = bf16 ? data_sheet_bf16_peak(device.description()) : 0; listed > 0)
      return {listed, fmt::format("bf16 peak by the data sheet of {}", device.description())};
    return {measure_products<T>(device),
            fmt::format("measured rate of {} products on {}", fsdp::name(fsdp::dtype_of<T>), device.description()), 0,
            true};
  }
}

/// Adds up what ranks have of a peak. @note Collective: yes; blocks.
template <class C>
double sum_of_peaks(C& world, double own) {
  double sum = 0;
  for (auto const& rate : world.exchange(fmt::format("{:.17g}", own), "peaks"))
    sum += std::strtod(rate.c_str(), nullptr);
  return sum;
}

}  // namespace detail

/// Whether a peak is measured, and may be again: one that a rank found while others had the machine is too low.
template <class C>
constexpr bool measures_peak_again = std::is_same_v<typename C::Device, fsdp::host::Device>;

/// The peak of a run that computes in T. Ranks that share a GPU share its peak; host ranks have cores of their own.
/// @param given  FLOP per second of one device, or of a host rank; 0: by the data sheet, or measured
/// @note Collective: yes; blocks.
template <class T, class C>
Peak measure_peak(C& world, double given = 0) {
  auto const& device = world.device();
  auto owner = fmt::format("rank {}", world.rank());
  if constexpr (requires { device.ordinal(); }) {
    owner = fmt::format("machine {}, process {}, device {}", host_name(), ::getpid(), device.ordinal());
  }
  auto const owners = world.exchange(owner, "owners of devices");
  auto const first = std::find(owners.begin(), owners.end(), owner) - owners.begin();
  Peak peak;
  if (first == world.rank())  // the only one of its device that measures
    peak = given > 0 ? Peak{given, "given peak"} : detail::device_peak<T>(device);
  peak.own = peak.flops;
  peak.flops = detail::sum_of_peaks(world, peak.own);
  return peak;
}

/// Raises a peak to what ranks have measured since.
/// @param measured  this rank's; 0: nothing
/// @return whether it has risen by 1 % or more
/// @note Collective: yes; blocks; one exchange.
template <class C>
bool raise(Peak& peak, C& world, double measured) {
  double const before = peak.flops;
  peak.own = std::max(peak.own, measured);
  peak.flops = detail::sum_of_peaks(world, peak.own);
  return peak.flops >= 1.01 * before;
}

}  // namespace transformer
