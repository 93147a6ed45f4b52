// SPDX-License-Identifier: Apache-2.0
// The Block of CUDA: threads of a thread block, run by a GPU or by a test that emulates one. Reductions over its
// threads, and packs of elements that a thread moves together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "fsdp/detail/kernels/block.hpp"

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

using fsdp::detail::load;

/// `Count` elements that move together, in units of up to 16 bytes.
template <class T, int Count>
struct alignas(sizeof(T) * Count < 16 ? sizeof(T) * Count : 16) Pack {
  T element[std::size_t{Count}];
};

/// Smallest element of these views, in bytes.
template <class View>
inline constexpr int element_bytes = sizeof(std::remove_pointer_t<View>);
template <>
inline constexpr int element_bytes<Indices> = 16;

template <class... Views>
FSDP_HD constexpr int pack_count() {
  int smallest = 16;
  ((smallest = element_bytes<Views> < smallest ? element_bytes<Views> : smallest), ...);
  return 16 / smallest;
}

/// True when packs of `Count` elements of this view may be read and written whole.
template <int Count, class T>
FSDP_HD inline bool aligned(T const* view) {
  return reinterpret_cast<std::uintptr_t>(view) % alignof(Pack<T, Count>) == 0;
}
template <int Count>
FSDP_HD inline bool aligned(Indices) {
  return true;
}

/// A pack of a view in registers, widened on demand.
template <int Count, class T>
struct Loaded {
  Pack<std::remove_cv_t<T>, Count> pack;
  FSDP_HD Loaded(T* view, std::int64_t i)
      : pack(*reinterpret_cast<Pack<std::remove_cv_t<T>, Count> const*>(view + i)) {}
  FSDP_HD Compute<T> operator[](int k) const { return widen(pack.element[k]); }
};
template <int Count>
struct LoadedIndices {
  std::int64_t first;
  FSDP_HD std::int64_t operator[](int k) const { return first + k; }
};
template <int Count, class T>
FSDP_HD inline Loaded<Count, T> load_pack(T* view, std::int64_t i) {
  return Loaded<Count, T>(view, i);
}
template <int Count>
FSDP_HD inline LoadedIndices<Count> load_pack(Indices view, std::int64_t i) {
  return LoadedIndices<Count>{view.first + i};
}

/// A pack of a view that `update` may write back.
template <int Count, class View>
struct Updated;
template <int Count, class T>
struct Updated<Count, T*> {
  T* place;
  Compute<T> value[std::size_t{Count}];
  FSDP_HD Updated(T* view, std::int64_t i) : place(view + i) {
    Loaded<Count, T> const loaded(view, i);
    FSDP_UNROLL
    for (int k = 0; k < Count; ++k) value[k] = loaded[k];
  }
  FSDP_HD Compute<T>& get(int k) { return value[k]; }
  FSDP_HD void store() const {
    if constexpr (!std::is_const_v<T>) {
      Pack<T, Count> pack;
      FSDP_UNROLL
      for (int k = 0; k < Count; ++k) pack.element[k] = narrow<T>(value[k]);
      *reinterpret_cast<Pack<T, Count>*>(place) = pack;
    }
  }
};
template <int Count>
struct Updated<Count, Indices> {
  std::int64_t first, value = 0;
  FSDP_HD Updated(Indices view, std::int64_t i) : first(view.first + i) {}
  FSDP_HD std::int64_t const& get(int k) {
    value = first + k;
    return value;
  }
  FSDP_HD void store() const {}
};

template <int Count, class F, class... Packs>
FSDP_HD inline void update_pack(F const& f, Packs... packs) {
  FSDP_UNROLL
  for (int k = 0; k < Count; ++k) f(packs.get(k)...);
  (packs.store(), ...);
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::cuda::detail

namespace fsdp::inline FSDP_VERSION_NAMESPACE::cuda {

namespace detail {

using fsdp::detail::lowest;
using fsdp::detail::Result;

/// Threads of a block of a kernel: `Kernel::threads` if declared, else 256.
template <class Kernel>
inline constexpr int threads_per_block = 256;
template <class Kernel>
requires requires { Kernel::threads; }
inline constexpr int threads_per_block<Kernel> = Kernel::threads;

/// Dynamic shared memory of a block of a kernel: that of reductions, and `Kernel::shared_bytes` if declared.
template <class Kernel>
inline constexpr std::size_t shared_bytes_per_block = reduction_bytes;
template <class Kernel>
requires requires { Kernel::shared_bytes; }
inline constexpr std::size_t shared_bytes_per_block<Kernel> = reduction_bytes + Kernel::shared_bytes;

}  // namespace detail

/// The Block of CUDA: a one-dimensional thread block whose size is a multiple of 32. Aligned views move in 128-bit
/// loads and stores; reductions are warp shuffles and one exchange through shared memory, in a fixed order.
///
/// Lanes is what runs the threads, a stateless type with static members for the calling thread: Hardware
/// (detail/cuda/hardware.hpp), or a test's emulation of it.
/// - `int thread()`, `int threads()`       index in the block, and size of the block
/// - `void sync(SyncSite)`                 barrier of the block
/// - `void sync_warp(SyncSite)`            barrier of the 32 lanes of a warp
/// - `T shuffle_xor(T value, int mask)`    value of the lane whose number differs by `mask`; all lanes of a warp call
/// it
/// - `std::byte* shared()`                 the block's dynamic shared memory, aligned to 128 bytes
///
/// Besides what every Block has, kernels for thread blocks alone may use `sync_warp`, `shuffle_xor`, `shared` and
/// `max_and_sum_exp`.
template <class LanesType>
struct ThreadBlock {
  using Lanes = LanesType;

  FSDP_HD int thread() const { return Lanes::thread(); }
  FSDP_HD int threads() const { return Lanes::threads(); }
  FSDP_HD void sync(SyncSite site = SyncSite::here()) const { Lanes::sync(site); }
  FSDP_HD void sync_warp(SyncSite site = SyncSite::here()) const { Lanes::sync_warp(site); }
  template <class T>
  FSDP_HD T shuffle_xor(T value, int mask) const {
    return Lanes::shuffle_xor(value, mask);
  }
  /// Bytes of dynamic shared memory that the block's own reductions use.
  static constexpr std::size_t reduction_bytes = detail::reduction_bytes;
  /// The kernel's `shared_bytes` bytes of shared memory, aligned to 128.
  FSDP_HD std::byte* shared() const { return Lanes::shared() + reduction_bytes; }

  template <class Out, class F, class... Views>
  FSDP_HD void each(std::int64_t n, Out* out, F f, Views... in) const {
    constexpr int count = detail::pack_count<Out*, Views...>();
    bool const whole = detail::aligned<count>(out) && (detail::aligned<count>(in) && ...);
    own<count>(
        n, whole, [&](std::int64_t i) { store_pack<count>(out + i, f, detail::load_pack<count>(in, i)...); },
        [&](std::int64_t i) { out[i] = narrow<Out>(f(detail::load(in, i)...)); });
  }

  template <class F, class... Views>
  FSDP_HD void update(std::int64_t n, F f, Views... views) const {
    constexpr int count = detail::pack_count<Views...>();
    own<count>(
        n, (detail::aligned<count>(views) && ...),
        [&](std::int64_t i) { detail::update_pack<count>(f, detail::Updated<count, Views>(views, i)...); },
        [&](std::int64_t i) { fsdp::detail::update_one(f, fsdp::detail::Element<Views>(views, i)...); });
  }

  template <class F, class... Views>
  FSDP_HD auto sum(std::int64_t n, F f, Views... in) const {
    using T = detail::Result<F, Views...>;
    static_assert(std::is_floating_point_v<T>, "the functor of a sum returns float or double");
    T partial{};
    visit(
        n, [&](T value) { partial += value; }, f, in...);
    return detail::reduce<Lanes>(partial, T{}, detail::Add{});
  }

  template <class F, class... Views>
  FSDP_HD auto sum_pair(std::int64_t n, F f, Views... in) const {
    using P = detail::Result<F, Views...>;
    P partial{};
    visit(
        n,
        [&](P value) {
          partial.first += value.first;
          partial.second += value.second;
        },
        f, in...);
    return detail::reduce<Lanes>(partial, P{}, detail::Add{});
  }

  template <class Out, class F, class... Views>
  FSDP_HD auto each_sum(std::int64_t n, Out* out, F f, Views... in) const {
    using T = detail::Result<F, Views...>;
    T partial{};
    each(
        n, out,
        [&](auto... elements) {
          T const value = f(elements...);
          partial += value;
          return value;
        },
        in...);
    return detail::reduce<Lanes>(partial, T{}, detail::Add{});
  }

  template <class F, class... Views>
  FSDP_HD auto max(std::int64_t n, F f, Views... in) const {
    using T = detail::Result<F, Views...>;
    T partial = detail::lowest<T>();
    visit(
        n, [&](T value) { partial = partial < value ? value : partial; }, f, in...);
    return detail::reduce<Lanes>(partial, detail::lowest<T>(), detail::Larger{});
  }

  /// The largest of n elements, and the sum of exp(element - largest), in one pass (Milakov, Gimelshein,
  /// arXiv:1805.02867): partial sums are rescaled when the largest changes.
  /// @pre n > 0, and no element is NaN or infinite
  template <class T>
  FSDP_HD auto max_and_sum_exp(std::int64_t n, T const* in) const {
    using P = Pair<Compute<T>>;
    constexpr int count = detail::pack_count<T const*>();
    detail::JoinExponentials const join;
    P partial{detail::lowest<Compute<T>>(), Compute<T>(0)};
    own<count>(
        n, detail::aligned<count>(in),
        [&](std::int64_t i) {
          auto const pack = detail::load_pack<count>(in, i);
          Compute<T> largest = partial.first;
          FSDP_UNROLL
          for (int k = 0; k < count; ++k) largest = largest < pack[k] ? pack[k] : largest;
          Compute<T> sum = join.shrunk(partial, largest);
          FSDP_UNROLL
          for (int k = 0; k < count; ++k) sum += math::exp_to_zero(pack[k] - largest);
          partial = {largest, sum};
        },
        [&](std::int64_t i) {
          partial = join(partial, P{widen(in[i]), Compute<T>(1)});
        });
    return detail::reduce<Lanes>(partial, P{detail::lowest<Compute<T>>(), Compute<T>(0)}, join);
  }

 private:
  template <int Count, class Out, class F, class... Packs>
  FSDP_HD static void store_pack(Out* out, F& f, Packs const&... packs) {
    detail::Pack<Out, Count> result;
    FSDP_UNROLL
    for (int k = 0; k < Count; ++k) result.element[k] = narrow<Out>(f(packs[k]...));
    *reinterpret_cast<detail::Pack<Out, Count>*>(out) = result;
  }
  template <int Count, class Take, class F, class... Packs>
  FSDP_HD static void take_pack(Take const& take, F const& f, Packs const&... packs) {
    FSDP_UNROLL
    for (int k = 0; k < Count; ++k) take(f(packs[k]...));
  }

  /// Hands f of every element of this thread to `take`.
  template <class Take, class F, class... Views>
  FSDP_HD void visit(std::int64_t n, Take const& take, F const& f, Views... in) const {
    constexpr int count = detail::pack_count<Views...>();
    own<count>(
        n, (detail::aligned<count>(in) && ...),
        [&](std::int64_t i) { take_pack<count>(take, f, detail::load_pack<count>(in, i)...); },
        [&](std::int64_t i) { take(f(detail::load(in, i)...)); });
  }

  /// Calls pack(i) for the packs [i, i + Count) of this thread where views are aligned (`whole`), else one(i) for each
  /// of their elements; and one(i) for its elements of the rest. Whose an element is depends on n and Count alone.
  template <int Count, class OfPack, class OfOne>
  FSDP_HD static void own(std::int64_t n, bool whole, OfPack const& pack, OfOne const& one) {
    std::int64_t const done = n - n % Count;
    std::int64_t const stride = std::int64_t{Lanes::threads()} * Count;
    std::int64_t i = std::int64_t{Lanes::thread()} * Count;
    if (Count > 1 && whole) {
      for (; i < done; i += stride) pack(i);
    } else {
      FSDP_ROLLED  // rare: it shall not cost registers
          for (; i < done; i += stride) {
        FSDP_ROLLED
        for (int k = 0; k < Count; ++k) one(i + k);
      }
    }
    if (std::int64_t const rest = done + Lanes::thread(); rest < n) one(rest);  // fewer than a warp has lanes
  }
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::cuda
