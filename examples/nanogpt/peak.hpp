// SPDX-License-Identifier: Apache-2.0
// What model FLOP utilisation is relative to: the peak of the devices in the type that is computed in.
#pragma once

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <type_traits>

#include "fsdp/host/device.hpp"
#include "fsdp/kernels/elementwise.hpp"
#include "fsdp/memory.hpp"
#include "gemm.hpp"
#include "metrics.hpp"

namespace nanogpt {

/// FLOP per second of all ranks together, and where the figure comes from.
struct Peak {
  double flops = 0;
  std::string source;
};

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

/// Highest rate of products of T with T, FLOP per second, measured for about 50 ms.
template <class T, class D>
double measure_products(D const& device) {
  using Clock = std::chrono::steady_clock;
#if defined(FSDP_CUDA_STANDIN)
  constexpr std::int64_t n = 256;  // computed by the host
#else
  constexpr std::int64_t n = sizeof(T) == 2 ? 8192 : 4096;
#endif
  constexpr std::size_t bytes = static_cast<std::size_t>(n * n) * sizeof(T);
  fsdp::MemoryAccount account;
  fsdp::AccountedMemory<D const> const memory(device, account, fsdp::MemoryTag::workspace, 3 * bytes);
  auto stream = device.make_stream("peak", fsdp::StreamPriority::normal);
  T* const a = memory.template as<T>();
  // Not zeros, with which a GPU draws less power and runs faster than it ever does in training.
  fsdp::kernels::initialize(device, stream, a, 2 * n * n, fsdp::init::normal(1.0f), 1, fsdp::hash_name("peak"), 0);
  Gemm<D> gemm(device);
  auto const product = [&] {
    device.synchronize(stream);
    auto const start = Clock::now();
    gemm.run(stream, Op::none, Op::none, n, n, n, 1, static_cast<T const*>(a), n, static_cast<T const*>(a + n * n), n,
             0, a + 2 * n * n, n);
    device.synchronize(stream);
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  double best = product();  // also warms up
  auto const begin = Clock::now();
  while (Clock::now() - begin < std::chrono::milliseconds(50)) best = std::min(best, product());
  return 2.0 * static_cast<double>(n * n * n) / best;
}

/// Peak of one rank's device.
template <class T, class D>
Peak device_peak(D const& device) {
  if constexpr (std::is_same_v<D, fsdp::host::Device>) {
    static_cast<void>(device);
    return {measure_sgemm_peak(), "measured sgemm peak"};
  } else {
    constexpr bool bf16 = std::is_same_v<T, fsdp::bf16>;
    if (double const listed = bf16 ? data_sheet_bf16_peak(device.description()) : 0; listed > 0)
      return {listed, fmt::format("bf16 peak by the data sheet of {}", device.description())};
    return {measure_products<T>(device),
            fmt::format("measured rate of {} products on {}", fsdp::name(fsdp::dtype_of<T>), device.description())};
  }
}

}  // namespace detail

/// The peak of a run that computes in T. Ranks that share a GPU share its peak; host ranks have cores of their own.
/// @note Collective: yes; blocks.
template <class T, class C>
Peak measure_peak(C& world) {
  auto const& device = world.device();
  auto owner = fmt::format("rank {}", world.rank());
  if constexpr (requires { device.ordinal(); }) {
    std::array<char, 256> host{};
    static_cast<void>(::gethostname(host.data(), host.size() - 1));
    owner = fmt::format("machine {}, process {}, device {}", host.data(), ::getpid(), device.ordinal());
  }
  auto const owners = world.exchange(owner, "owners of devices");
  auto const first = std::find(owners.begin(), owners.end(), owner) - owners.begin();
  Peak peak;
  if (first == world.rank()) peak = detail::device_peak<T>(device);  // the only one of its device that measures
  auto const rates = world.exchange(fmt::format("{:.17g}", peak.flops), "peaks");
  peak.flops = 0;
  for (auto const& rate : rates) peak.flops += std::strtod(rate.c_str(), nullptr);
  return peak;
}

}  // namespace nanogpt
