// SPDX-License-Identifier: Apache-2.0
// Values, buffers and checks that the conformance suites share. Works on any device.
#pragma once

#include <fmt/format.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/concepts.hpp"
#include "fsdp/error.hpp"
#include "tests/support/sanitized.hpp"

namespace fsdp::conformance {

using fsdp::testing::sanitized;

/// A check that failed. Catch2's assertions may not run in several threads, so checks throw, on the rank that saw it.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <class... Args>
void expect(bool condition, fmt::format_string<Args...> text, Args&&... args) {
  if (!condition) throw Failure(fmt::format(text, std::forward<Args>(args)...));
}

/// Runs `action`, which must throw an E, and returns its text.
template <class E, class Action>
std::string expect_throws(std::string_view what, Action&& action) {
  try {
    action();
  } catch (E const& error) {
    return error.what();
  } catch (std::exception const& error) {
    throw Failure(fmt::format("{}: another exception came: {}", what, error.what()));
  }
  throw Failure(fmt::format("{}: no exception came", what));
}

template <class T>
double to_double(T value) {
  if constexpr (std::is_same_v<T, bf16> || std::is_same_v<T, fp16>) {
    return static_cast<double>(static_cast<float>(value));
  } else {
    return static_cast<double>(value);
  }
}
template <class T>
T from_double(double value) {
  if constexpr (std::is_same_v<T, bf16> || std::is_same_v<T, fp16>) {
    return T(static_cast<float>(value));
  } else {
    return static_cast<T>(value);
  }
}
template <class T>
bool same_bits(T const& a, T const& b) {
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}

inline std::uint64_t mix(std::uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}
inline std::uint64_t hash(int rank, std::size_t i, std::uint64_t salt) {
  return mix(mix(salt * 0x9e3779b97f4a7c15u + static_cast<std::uint64_t>(rank) + 1) + i * 0xd1342543de82ef95u);
}
/// A small integer in [-8, 7]: exact in every element type, and so are sums over up to 16 ranks.
template <class T>
T small(int rank, std::size_t i, std::uint64_t salt) {
  return from_double<T>(static_cast<double>(hash(rank, i, salt) % 16) - 8.0);
}
/// A value whose sums depend on the order of addition (floating-point types).
template <class T>
T rough(int rank, std::size_t i, std::uint64_t salt) {
  auto const bits = hash(rank, i, salt);
  double const unit = static_cast<double>(bits >> 11) * 0x1p-53 - 0.5;
  return from_double<T>(unit * static_cast<double>(1u << (bits % 7)));
}

/// The type that sums of T are made in.
template <class T>
using SumOf = std::conditional_t<std::is_same_v<T, bf16> || std::is_same_v<T, fp16>, float, T>;

/// The pairwise tree, level by level as it is defined: adjacent pairs are added, an odd one is carried up.
/// @param value value(rank): the term of a rank; any number of ranks
template <class T, class Value>
T tree_sum(int ranks, Value const& value) {
  thread_local std::vector<SumOf<T>> level;  // it is called for every element
  level.resize(static_cast<std::size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) level[static_cast<std::size_t>(rank)] = static_cast<SumOf<T>>(value(rank));
  for (auto width = static_cast<std::size_t>(ranks); width > 1; width = (width + 1) / 2) {
    for (std::size_t i = 0; i < width / 2; ++i) level[i] = level[2 * i] + level[2 * i + 1];
    if (width % 2 == 1) level[width / 2] = level[width - 1];
  }
  return static_cast<T>(level[0]);
}

/// Memory of an allocator (a device or a communicator) as `count` elements.
template <class T, class Allocator>
class Buffer {
 public:
  Buffer(Allocator& allocator, std::size_t count)
      : allocator_(&allocator), count_(count), data_(static_cast<T*>(allocator.allocate(count * sizeof(T)))) {}
  Buffer(Buffer const&) = delete;
  Buffer& operator=(Buffer const&) = delete;
  ~Buffer() { allocator_->deallocate(data_, count_ * sizeof(T)); }

  T* data() const { return data_; }
  std::size_t size() const { return count_; }

 private:
  Allocator* allocator_;
  std::size_t count_;
  T* data_;
};

/// Copies host values to device memory and waits.
template <class D, class T>
void upload(D const& device, typename D::Stream& stream, T* to, std::vector<T> const& values) {
  device.copy_async(stream, to, values.data(), values.size() * sizeof(T));
  device.synchronize(stream);
}
/// Waits for the stream and returns `count` elements of device memory.
template <class D, class T>
std::vector<T> download(D const& device, typename D::Stream& stream, T const* from, std::size_t count) {
  std::vector<T> values(count);
  device.copy_async(stream, values.data(), from, count * sizeof(T));
  device.synchronize(stream);
  return values;
}

template <class T>
void expect_equal(std::vector<T> const& got, std::vector<T> const& expected, std::string const& what) {
  expect(got.size() == expected.size(), "{}: {} elements, expected {}", what, got.size(), expected.size());
  if (got.empty() || std::memcmp(got.data(), expected.data(), got.size() * sizeof(T)) == 0) return;
  for (std::size_t i = 0; i < got.size(); ++i) {
    expect(same_bits(got[i], expected[i]), "{}: element {} of {} is {:.17g}, expected {:.17g}", what, i, got.size(),
           to_double(got[i]), to_double(expected[i]));
  }
}

}  // namespace fsdp::conformance
