// SPDX-License-Identifier: Apache-2.0
// The Block of CUDA: the threads of a thread block. Compiled by nvcc only.
#pragma once

#if !defined(__CUDACC__)
#error "fsdp/cuda/block.hpp is for CUDA sources; the host's Block is in fsdp/kernels.hpp"
#endif

#include <cstdint>
#include <type_traits>

#include "fsdp/kernels.hpp"

#if defined(__CUDA_ARCH__)
#define FSDP_UNROLL _Pragma("unroll")
#else
#define FSDP_UNROLL
#endif

namespace fsdp::cuda {

namespace detail {

using fsdp::detail::load;
using fsdp::detail::lowest;
using fsdp::detail::Result;

/// `Count` elements that move together, in units of up to 16 bytes.
template <class T, int Count>
struct alignas(sizeof(T) * Count < 16 ? sizeof(T) * Count : 16) Pack {
  T element[Count];
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

/// One pack of a view in registers, widened on demand.
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
  Compute<T> value[Count];
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

struct Add {
  template <class T>
  FSDP_HD T operator()(T a, T b) const {
    return a + b;
  }
};
struct Larger {
  template <class T>
  FSDP_HD T operator()(T a, T b) const {
    return a < b ? b : a;
  }
};

#if defined(__CUDA_ARCH__)
/// Combines one value of each thread; every thread gets the same result. The block has a multiple of 32 threads.
template <class T, class Combine>
__device__ inline T reduce(T value, T identity, Combine combine) {
  __shared__ T slots[32];
  // A butterfly adds the same two numbers on both sides of each exchange: all lanes agree bitwise.
  for (int offset = 16; offset > 0; offset /= 2) value = combine(value, __shfl_xor_sync(0xffffffffu, value, offset));
  __syncthreads();  // slots may still be read by an earlier reduction
  if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = value;
  __syncthreads();
  T total = threadIdx.x % 32 < blockDim.x / 32 ? slots[threadIdx.x % 32] : identity;
  for (int offset = 16; offset > 0; offset /= 2) total = combine(total, __shfl_xor_sync(0xffffffffu, total, offset));
  return total;
}
#endif

}  // namespace detail

/// The Block of CUDA: a one-dimensional thread block whose size is a multiple of 32. Aligned views move in 128-bit
/// loads and stores; reductions are warp shuffles and one exchange through shared memory, in a fixed order.
struct CudaBlock {
  FSDP_HD int thread() const {
#if defined(__CUDA_ARCH__)
    return static_cast<int>(threadIdx.x);
#else
    return 0;
#endif
  }
  FSDP_HD int threads() const {
#if defined(__CUDA_ARCH__)
    return static_cast<int>(blockDim.x);
#else
    return 1;
#endif
  }
  FSDP_HD void sync() const {
#if defined(__CUDA_ARCH__)
    __syncthreads();
#endif
  }

  template <class Out, class F, class... Views>
  FSDP_HD void each(std::int64_t n, Out* out, F f, Views... in) const {
    constexpr int count = detail::pack_count<Out*, Views...>();
    std::int64_t done = 0;
    if (count > 1 && detail::aligned<count>(out) && (detail::aligned<count>(in) && ...)) {
      done = n - n % count;
      for (std::int64_t i = std::int64_t{thread()} * count; i < done; i += std::int64_t{threads()} * count) {
        store_pack<count>(out + i, f, detail::load_pack<count>(in, i)...);
      }
    }
    for (std::int64_t i = done + thread(); i < n; i += threads()) out[i] = narrow<Out>(f(detail::load(in, i)...));
  }

  template <class F, class... Views>
  FSDP_HD void update(std::int64_t n, F f, Views... views) const {
    constexpr int count = detail::pack_count<Views...>();
    std::int64_t done = 0;
    if (count > 1 && (detail::aligned<count>(views) && ...)) {
      done = n - n % count;
      for (std::int64_t i = std::int64_t{thread()} * count; i < done; i += std::int64_t{threads()} * count) {
        detail::update_pack<count>(f, detail::Updated<count, Views>(views, i)...);
      }
    }
    for (std::int64_t i = done + thread(); i < n; i += threads()) {
      fsdp::detail::update_one(f, fsdp::detail::Element<Views>(views, i)...);
    }
  }

  template <class F, class... Views>
  FSDP_HD auto sum(std::int64_t n, F f, Views... in) const {
    using T = detail::Result<F, Views...>;
    static_assert(std::is_floating_point_v<T>, "the functor of a sum returns float or double");
    T partial{};
    visit(
        n, [&](T value) { partial += value; }, f, in...);
    return combine(partial, T{}, detail::Add{});
  }

  template <class F, class... Views>
  FSDP_HD auto sum_pair(std::int64_t n, F f, Views... in) const {
    using P = detail::Result<F, Views...>;
    using T = decltype(P::first);
    P partial{};
    visit(
        n,
        [&](P value) {
          partial.first += value.first;
          partial.second += value.second;
        },
        f, in...);
    T const first = combine(partial.first, T{}, detail::Add{});
    return P{first, combine(partial.second, T{}, detail::Add{})};
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
    return combine(partial, T{}, detail::Add{});
  }

  template <class F, class... Views>
  FSDP_HD auto max(std::int64_t n, F f, Views... in) const {
    using T = detail::Result<F, Views...>;
    T partial = detail::lowest<T>();
    visit(
        n, [&](T value) { partial = partial < value ? value : partial; }, f, in...);
    return combine(partial, detail::lowest<T>(), detail::Larger{});
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
    std::int64_t done = 0;
    if (count > 1 && (detail::aligned<count>(in) && ...)) {
      done = n - n % count;
      for (std::int64_t i = std::int64_t{thread()} * count; i < done; i += std::int64_t{threads()} * count) {
        take_pack<count>(take, f, detail::load_pack<count>(in, i)...);
      }
    }
    for (std::int64_t i = done + thread(); i < n; i += threads()) take(f(detail::load(in, i)...));
  }

  template <class T, class Combine>
  FSDP_HD static T combine(T value, T identity, Combine operation) {
#if defined(__CUDA_ARCH__)
    return detail::reduce(value, identity, operation);
#else
    (void)identity;
    (void)operation;
    return value;
#endif
  }
};

}  // namespace fsdp::cuda
