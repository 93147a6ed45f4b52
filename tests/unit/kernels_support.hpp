// SPDX-License-Identifier: Apache-2.0
// A device that runs kernels at once on the calling thread, and helpers shared by the kernel tests.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <random>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/concepts.hpp"
#include "fsdp/detail/kernels/block.hpp"

namespace kernel_test {

/// Runs blocks in a loop; `reversed` runs them last to first, which no kernel may notice.
struct LoopDevice {
  static constexpr std::string_view name = "loop";
  struct Stream {};
  struct Event {};

  bool reversed = false;

  Stream make_stream(std::string_view, fsdp::StreamPriority) const { return {}; }
  Event make_event() const { return {}; }
  void* allocate(std::size_t bytes) const {
    return bytes == 0 ? nullptr : ::operator new (bytes, std::align_val_t{256});
  }
  void deallocate(void* memory, std::size_t) const noexcept { ::operator delete (memory, std::align_val_t{256}); }
  void copy_async(Stream&, void* to, void const* from, std::size_t bytes) const { std::memcpy(to, from, bytes); }
  void zero_async(Stream&, void* to, std::size_t bytes) const { std::memset(to, 0, bytes); }
  void record(Event&, Stream&) const {}
  void wait(Stream&, Event const&, fsdp::WaitSite) const {}
  void synchronize(Stream&) const {}
  void synchronize(Event const&) const {}
  template <class Kernel, class... Args>
  void launch(Stream&, std::int64_t blocks, Kernel kernel, Args... args) const {
    for (std::int64_t i = 0; i < blocks; ++i) kernel(fsdp::HostBlock{}, reversed ? blocks - 1 - i : i, args...);
  }
};
static_assert(fsdp::Device<LoopDevice>);

/// Sizes that meet every edge: empty, one, around the 64 lanes, odd, more than a chunk.
inline std::vector<std::int64_t> const sizes{0, 1, 2, 3, 63, 64, 65, 127, 1000, 16383, 16384, 16385, 50001};

/// Normal values, converted to T.
template <class T = float>
std::vector<T> random_values(std::int64_t n, unsigned seed, double deviation = 1.0) {
  std::mt19937_64 engine(seed);
  std::normal_distribution<double> normal(0.0, deviation);
  std::vector<T> values(static_cast<std::size_t>(n));
  for (auto& value : values) value = fsdp::narrow<T>(normal(engine));
  return values;
}

/// Half a unit in the last place of 1, per element type.
template <class T>
inline constexpr double rounding = 0.0;
template <>
inline constexpr double rounding<double> = 0x1p-53;
template <>
inline constexpr double rounding<float> = 0x1p-24;
template <>
inline constexpr double rounding<fsdp::fp16> = 0x1p-11;
template <>
inline constexpr double rounding<fsdp::bf16> = 0x1p-8;

template <class T>
double as_double(T value) {
  return static_cast<double>(fsdp::widen(value));
}

constexpr double float_unit = 0x1p-24;

/// Sum and sum of magnitudes of f(i), in long double.
template <class F>
std::pair<double, double> exact_sum(std::int64_t n, F f) {
  long double sum = 0, size = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    auto const term = static_cast<long double>(f(static_cast<std::size_t>(i)));
    sum += term;
    size += std::fabs(term);
  }
  return {static_cast<double>(sum), static_cast<double>(size)};
}

}  // namespace kernel_test
