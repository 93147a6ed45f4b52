// SPDX-License-Identifier: Apache-2.0
// The Block of CUDA: threads of a thread block, run by a GPU or by a test that emulates one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "fsdp/cuda/packs.hpp"
#include "fsdp/cuda/reduction.hpp"
#include "fsdp/cuda/unroll.hpp"
#include "fsdp/kernels/block.hpp"

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
/// (fsdp/cuda/hardware.hpp), or a test's emulation of it.
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
