// SPDX-License-Identifier: Apache-2.0
// Kernels in emulated thread blocks under every schedule, and comparison with what they should give.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

#include "tests/catch.hpp"
#include "tests/support/emulated_device.hpp"
#include "tests/unit/kernels_support.hpp"

namespace emulated {

using Doubles = std::vector<double>;

/// Memory as a device allocates it: aligned to 256 bytes.
template <class T>
struct AlignedAllocator {
  using value_type = T;
  AlignedAllocator() = default;
  template <class U>
  explicit AlignedAllocator(AlignedAllocator<U> const&) {}
  T* allocate(std::size_t n) { return static_cast<T*>(::operator new (n * sizeof(T), std::align_val_t{256})); }
  void deallocate(T* memory, std::size_t) { ::operator delete (memory, std::align_val_t{256}); }
  friend bool operator==(AlignedAllocator const&, AlignedAllocator const&) { return true; }
};
template <class T>
using Aligned = std::vector<T, AlignedAllocator<T>>;

/// A copy of some values that begins `skip` elements behind an aligned address and ends where its memory ends.
template <class T>
class View {
 public:
  View(std::vector<T> const& values, std::size_t skip) : memory_(values.size() + skip), skip_(skip) {
    std::copy(values.begin(), values.end(), memory_.begin() + static_cast<std::ptrdiff_t>(skip));
  }
  T* out() { return memory_.data() + skip_; }
  T const* in() const { return memory_.data() + skip_; }
  std::vector<T> values() const { return {memory_.begin() + static_cast<std::ptrdiff_t>(skip_), memory_.end()}; }

 private:
  std::vector<T> memory_;
  std::size_t skip_;
};

template <class T>
Doubles doubles(std::vector<T> const& values) {
  Doubles wide;
  for (auto const& value : values) wide.push_back(kernel_test::as_double(value));
  return wide;
}
template <class T>
Doubles doubles(View<T> const& view) {
  return doubles(view.values());
}

/// The result of `run(device, skip)`, which must be the same, bit by bit, under every schedule, with aligned views and
/// with unaligned ones. A list of arrays.
/// @param skips  elements from aligned addresses to the views
template <class Run>
std::vector<Doubles> everywhere(Run run, std::vector<std::size_t> const& skips = {0, 1}) {
  std::vector<Doubles> first;
  for (auto const schedule : schedules) {
    for (std::size_t const skip : skips) {
      CAPTURE(name(schedule), skip);
      Device device;
      device.options.schedule = schedule;
      device.options.seed = 7 + skip;
      std::vector<Doubles> const got = run(std::as_const(device), skip);
      if (first.empty()) first = got;
      REQUIRE(got.size() == first.size());
      for (std::size_t array = 0; array < got.size(); ++array) {
        CAPTURE(array);
        REQUIRE(got[array].size() == first[array].size());
        bool const same = got[array].empty() ||
                          std::memcmp(got[array].data(), first[array].data(), got[array].size() * sizeof(double)) == 0;
        REQUIRE(same);
      }
    }
  }
  return first;
}

/// Every got within `factor` roundings of T of exact, relative to the larger of |exact| and `size`.
template <class T>
void check_close(Doubles const& got, Doubles const& exact, double factor, double size) {
  REQUIRE(got.size() == exact.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    double const bound = factor * kernel_test::rounding<T> * std::fmax(std::fabs(exact[i]), size);
    if (!(std::fabs(got[i] - exact[i]) <= bound)) {
      FAIL("element " << i << " is " << got[i] << ", not " << exact[i] << ", beyond " << bound);
    }
  }
}

inline std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

}  // namespace emulated
