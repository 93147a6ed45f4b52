// SPDX-License-Identifier: Apache-2.0
// Reductions over the threads of a block: butterflies of shuffles, and one exchange through shared memory.
#pragma once

#include <cstddef>

#include "fsdp/kernels/block.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::cuda::detail {

struct Add {
  template <class T>
  FSDP_HD T operator()(T a, T b) const {
    return a + b;
  }
  template <class T>
  FSDP_HD Pair<T> operator()(Pair<T> a, Pair<T> b) const {
    return {a.first + b.first, a.second + b.second};
  }
};
struct Larger {
  template <class T>
  FSDP_HD T operator()(T a, T b) const {
    return a < b ? b : a;
  }
};

/// Joins (largest, sum of exponentials relative to it) of two sets. An empty set is (lowest, 0).
struct JoinExponentials {
  template <class T>
  FSDP_HD T shrunk(Pair<T> set, T largest) const {
    return set.second == T(0) ? T(0) : set.second * math::exp_to_zero(set.first - largest);
  }
  template <class T>
  FSDP_HD Pair<T> operator()(Pair<T> a, Pair<T> b) const {
    T const largest = a.first < b.first ? b.first : a.first;
    return {largest, shrunk(a, largest) + shrunk(b, largest)};
  }
};

template <class Lanes, class T>
FSDP_HD inline T exchange(T value, int mask) {
  return Lanes::shuffle_xor(value, mask);
}
template <class Lanes, class T>
FSDP_HD inline Pair<T> exchange(Pair<T> value, int mask) {
  return {Lanes::shuffle_xor(value.first, mask), Lanes::shuffle_xor(value.second, mask)};
}

/// Bytes at the start of a block's dynamic shared memory that reductions exchange their values in: one slot of up to 16
/// bytes for each warp.
inline constexpr std::size_t reduction_bytes = 32 * 16;

/// Combines one value of each thread; every thread gets the same result.
template <class Lanes, class T, class Combine>
FSDP_HD inline T reduce(T value, T identity, Combine combine) {
  static_assert(32 * sizeof(T) <= reduction_bytes);
  T* const slots = reinterpret_cast<T*>(Lanes::shared());
  int const lane = Lanes::thread() % 32;
  // A butterfly adds the same two numbers on both sides of each exchange: all lanes agree bitwise.
  for (int mask = 16; mask > 0; mask /= 2) value = combine(value, exchange<Lanes>(value, mask));
  Lanes::sync(SyncSite::here());  // an earlier reduction has read the slots
  if (lane == 0) slots[Lanes::thread() / 32] = value;
  Lanes::sync(SyncSite::here());  // every warp has written its slot
  T total = lane < Lanes::threads() / 32 ? slots[lane] : identity;
  for (int mask = 16; mask > 0; mask /= 2) total = combine(total, exchange<Lanes>(total, mask));
  return total;
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::cuda::detail
