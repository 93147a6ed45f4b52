// SPDX-License-Identifier: Apache-2.0
// Measured peak rates of the device: a copy out of a cold cache, and a large matrix product.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/kernels.hpp"
#include "marks.hpp"
#include "settings.hpp"
#include "transformer/math/gemm.hpp"
#include "transformer/math/peak.hpp"

namespace bench {

struct Roof {
  double copy_bytes = 0;        ///< bytes read and written per second
  double gemm_flops = 0;        ///< FLOP per second of products in the step's type
  std::size_t cache = 0;        ///< bytes of the last-level cache
  std::size_t working_set = 0;  ///< four times that: what a copy's source and destination hold together
  std::int64_t gemm_size = 0;
  double peak_flops = 0;  ///< that MFU is relative to
  std::string peak_source;
  double mark_seconds = 0;  ///< between the marks around a kernel that does nothing
};

/// Device memory that frees itself. Filled with normal deviates where asked: zeros would flatter a matrix product.
template <class D>
class Scratch {
 public:
  using Stream = typename D::Stream;
  Scratch(D const& device, std::size_t bytes) : device_(device), bytes_(bytes), data_(device.allocate(bytes)) {}
  Scratch(Scratch const&) = delete;
  Scratch& operator=(Scratch const&) = delete;
  ~Scratch() { device_.deallocate(data_, bytes_); }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  template <class T>
  void randomise(Stream& stream, float deviation, std::uint64_t seed) const {
    fsdp::kernels::initialize(device_, stream, as<T>(), static_cast<std::int64_t>(bytes_ / sizeof(T)),
                              fsdp::init::normal(deviation), seed, 1, 0);
  }
  std::size_t bytes() const { return bytes_; }

 private:
  D device_;
  std::size_t bytes_;
  void* data_;
};

/// Times single calls, each after the cache has been filled with other lines. They are clean: what a call writes need
/// not first make room by writing something else back.
template <class D>
class ColdTimer {
 public:
  using Stream = typename D::Stream;

  ColdTimer(D const& device, Stream& stream, std::size_t cache, std::int64_t repeats)
      : device_(device),
        stream_(&stream),
        repeats_(static_cast<std::size_t>(repeats)),
        marks_(device, 2 * repeats_),
        filler_(device, 2 * cache),
        partials_(device, static_cast<std::size_t>(fsdp::kernels::norm_partial_count(floats())) * sizeof(double)) {
    filler_.template randomise<float>(stream, 1.0f, 3);
  }

  /// Median seconds of `call`, which enqueues on the stream.
  template <class Call>
  double operator()(Call&& call) {
    call();  // warms up
    device_.synchronize(*stream_);
    for (std::size_t i = 0; i < repeats_; ++i) {
      fsdp::kernels::norm_partials(device_, *stream_, static_cast<float const*>(filler_.template as<float>()), floats(),
                                   fsdp::NormKind::l2, partials_.template as<double>());
      marks_.set(*stream_, 2 * i);
      call();
      marks_.set(*stream_, 2 * i + 1);
    }
    device_.synchronize(*stream_);
    std::vector<double> times(repeats_);
    for (std::size_t i = 0; i < repeats_; ++i) times[i] = marks_.seconds(2 * i, 2 * i + 1);
    std::sort(times.begin(), times.end());
    return 0.5 * (times[(repeats_ - 1) / 2] + times[repeats_ / 2]);
  }

 private:
  std::int64_t floats() const { return static_cast<std::int64_t>(filler_.bytes() / sizeof(float)); }

  D device_;
  Stream* stream_;
  std::size_t repeats_;
  Marks<D> marks_;
  Scratch<D> filler_, partials_;
};

/// A GPU's clocks rise while it works: half a second of `call`. The host needs none.
template <class D, class Call>
void warm_up(D const& device, typename D::Stream& stream, Call&& call) {
  using Clock = std::chrono::steady_clock;
  if constexpr (HasTimedEvents<D>) {
    for (auto const begin = Clock::now(); Clock::now() - begin < std::chrono::milliseconds(500);) {
      call();
      device.synchronize(stream);
    }
  }
}

/// Bytes of the host's last-level cache, as the system tells it.
inline std::size_t host_cache() {
  for (int const level : {_SC_LEVEL3_CACHE_SIZE, _SC_LEVEL2_CACHE_SIZE})
    if (long const bytes = ::sysconf(level); bytes > 0) return static_cast<std::size_t>(bytes);
  return std::size_t{32} << 20;
}

/// @tparam T  type of the products
/// @param cache  of the device; --cache_kib goes before it
template <class T, class D>
Roof measure_roof(D const& device, typename D::Stream& stream, StepSettings const& settings, std::size_t cache,
                  std::string_view device_name) {
  Roof roof;
  roof.cache = settings.cache_kib > 0 ? static_cast<std::size_t>(settings.cache_kib) << 10 : cache;
  roof.working_set = 4 * roof.cache;
  ColdTimer<D> time(device, stream, roof.cache, settings.repeats);
  {
    auto const n = roof.gemm_size = settings.gemm_size;
    auto const bytes = static_cast<std::size_t>(n * n) * sizeof(T);
    Scratch<D> const a(device, bytes), b(device, bytes), c(device, bytes);
    a.template randomise<T>(stream, 1.0f, 1);
    b.template randomise<T>(stream, 1.0f, 2);
    transformer::Gemm<D> gemm(device);
    auto const product = [&] {
      gemm.run(stream, transformer::Op::none, transformer::Op::transpose, n, n, n, 1,
               static_cast<T const*>(a.template as<T>()), n, static_cast<T const*>(b.template as<T>()), n, 0,
               c.template as<T>(), n);
    };
    warm_up(device, stream, product);
    roof.gemm_flops = 2.0 * static_cast<double>(n) * static_cast<double>(n) * static_cast<double>(n) / time(product);
  }
  roof.mark_seconds = time([&] { device.launch(stream, std::int64_t{1}, fsdp::detail::ProbeKernel{}, 0.0f); });
  {
    Scratch<D> const from(device, roof.working_set / 2), to(device, roof.working_set / 2);
    from.template randomise<float>(stream, 1.0f, 1);
    auto const copy =
        time([&] { device.copy_async(stream, to.template as<void>(), from.template as<void>(), from.bytes()); });
    roof.copy_bytes = static_cast<double>(2 * from.bytes()) / copy;
  }
  roof.peak_flops = settings.peak_tflops > 0 ? settings.peak_tflops * 1e12
                    : sizeof(T) == 2         ? transformer::data_sheet_bf16_peak(device_name)
                                             : 0;
  roof.peak_source = settings.peak_tflops > 0 ? "given" : roof.peak_flops > 0 ? "data sheet, dense bf16" : "measured";
  if (!(roof.peak_flops > 0)) roof.peak_flops = roof.gemm_flops;
  return roof;
}

}  // namespace bench
