// SPDX-License-Identifier: Apache-2.0
// The Block that single-source kernels are written against, and its model on the host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "fsdp/detail/kernels/math.hpp"
#include "fsdp/tensor.hpp"
#include "fsdp/version.hpp"

#if defined(__CUDA_ARCH__)
#define FSDP_UNROLL _Pragma("unroll")
#define FSDP_UNROLL_BY_4 _Pragma("unroll 4")
#define FSDP_ROLLED _Pragma("unroll 1")
#else
#define FSDP_UNROLL
#define FSDP_UNROLL_BY_4
#define FSDP_ROLLED
#endif

// The loop that follows has no dependence between iterations: views are equal or disjoint.
// Clang checks for overlap at run time instead: its pragma makes an error of a loop that it leaves scalar.
#if defined(__CUDACC__) || defined(__clang__)
#define FSDP_INDEPENDENT
#else
#define FSDP_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// [Note: Kernels from one source]
/// A kernel is an empty type with `template <class Block> FSDP_HD void operator()(Block const& block, std::int64_t
/// index, args...) const`. `device.launch(stream, blocks, Kernel{}, args...)` calls it for every index in
/// [0, blocks), in no order that a kernel may rely on. On the host a Block is one lane of a worker thread; on CUDA it
/// is a thread block, and every thread of it makes the same calls.
///
/// Operations take `n`, a scalar functor and *views*. A view is a pointer to float, double, bf16, fp16 or an integer,
/// or `Indices`. Elements arrive converted: bf16 and fp16 as float, others as they are; results are rounded to the
/// type of the view that takes them. Views of one call are equal or disjoint.
///
/// - `block.each(n, out, f, in...)`        out[i] = f(in[i]...)
/// - `block.update(n, f, views...)`        f(element&...); const views pass values, the others are written back
/// - `block.sum(n, f, in...)`              sum of f(in[i]...), in the type that f returns: float or double
/// - `block.sum_pair(n, f, in...)`         both sums of the Pair that f returns, in one pass
/// - `block.each_sum(n, out, f, in...)`    each, and the sum of the values before they are rounded to `out`
/// - `block.max(n, f, in...)`              largest f(in[i]...), ignoring NaN; the lowest value of the type when n = 0
/// - `block.thread()`, `block.threads()`   for plain strided loops
/// - `block.sync()`                        earlier writes of the block are visible to the whole block; see SyncSite
///
/// Reductions give every thread the result and are also a `sync`. Which thread handles element i depends on i, n and
/// the size of the smallest element among the views (and `out`) alone, neither on the operation nor on how views are
/// aligned. So no `sync` is needed between operations that agree in n and in that size and touch an array at the same
/// index: a thread then meets only what it wrote itself. One is needed, or a reduction, wherever else an operation or a
/// plain access reads what an earlier one wrote, or writes what an earlier one read or wrote.
/// Sums run in an order that depends on n, element sizes and the model of Block alone, so results repeat bitwise.

/// Source location of a barrier: the default argument of `sync`, which devices ignore. Tests that run thread blocks on
/// the host leave out the barriers of one place at a time: each must be missed. A function with a barrier for several
/// kernels may take the place of its caller, who passes `SyncSite::here()`, and give it to `sync`.
struct SyncSite {
  char const* file = "";
  int line = 0;
  /// Source location of the call, or of the call that has this as its default argument.
  FSDP_HD static constexpr SyncSite here(char const* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

/// True for a device that runs kernels as thread blocks (detail/cuda/block.hpp), so that kernels written for those
/// alone may be launched on it. Such a device declares `static constexpr bool thread_blocks = true`.
template <class D>
concept RunsThreadBlocks = requires {
  requires D::thread_blocks;
};

/// Two sums, or two values to add.
template <class T>
struct Pair {
  T first, second;
};

/// A view whose element i is `first + i`.
struct Indices {
  std::int64_t first = 0;
};

/// The type for arithmetic on elements of type T.
template <class T>
struct ComputeTypeOf {
  using type = std::remove_cv_t<T>;
};
template <>
struct ComputeTypeOf<bf16> {
  using type = float;
};
template <>
struct ComputeTypeOf<fp16> {
  using type = float;
};
template <class T>
using Compute = typename ComputeTypeOf<std::remove_cv_t<T>>::type;

/// An element, converted to the type of its arithmetic.
template <class T>
FSDP_HD inline Compute<T> widen(T const& element) {
  return static_cast<Compute<T>>(element);
}

/// Value rounded to an element type.
template <class T, class V>
FSDP_HD inline T narrow(V value) {
  if constexpr (std::is_same_v<T, V>) {
    return value;
  } else if constexpr (std::is_same_v<T, bf16> || std::is_same_v<T, fp16>) {
    return T(static_cast<float>(value));
  } else {
    return static_cast<T>(value);
  }
}

namespace detail {

template <class T>
FSDP_HD inline Compute<T> load(T const* view, std::int64_t i) {
  return widen(view[i]);
}
FSDP_HD inline std::int64_t load(Indices view, std::int64_t i) { return view.first + i; }

/// Argument of `update`'s functor for one element: a value of a const view, or a value that is written back.
template <class View>
struct Element;
template <class T>
struct Element<T*> {
  T* place;
  Compute<T> value;
  FSDP_HD Element(T* view, std::int64_t i) : place(view + i), value(widen(view[i])) {}
  FSDP_HD Compute<T>& get() { return value; }
  FSDP_HD void store() const {
    if constexpr (!std::is_const_v<T>) *place = narrow<T>(value);
  }
};
template <>
struct Element<Indices> {
  std::int64_t value;
  FSDP_HD Element(Indices view, std::int64_t i) : value(view.first + i) {}
  FSDP_HD std::int64_t const& get() { return value; }
  FSDP_HD void store() const {}
};

template <class F, class... Elements>
FSDP_HD inline void update_one(F const& f, Elements... elements) {
  f(elements.get()...);
  (elements.store(), ...);
}

/// The type that f returns for elements of these views.
template <class F, class... Views>
using Result = std::remove_cvref_t<decltype(std::declval<F const&>()(load(std::declval<Views>(), 0)...))>;

/// Start value of a maximum.
template <class T>
FSDP_HD constexpr T lowest() {
  if constexpr (std::is_same_v<T, float>) {
    return -__builtin_huge_valf();
  } else if constexpr (std::is_same_v<T, double>) {
    return -__builtin_huge_val();
  } else {
    return T(std::is_signed_v<T> ? T(1) << (8 * sizeof(T) - 1) : T(0));
  }
}

}  // namespace detail

/// The Block of the host: one lane. Reductions keep 64 explicit accumulators, which compilers turn into vector
/// registers without being allowed to reorder a sum; they are combined by halves at the end.
///
/// Operations are always inlined: otherwise what a functor captures travels through memory, which a short row feels.
struct HostBlock {
  static constexpr int lanes = 64;  ///< accumulators of a reduction
  static constexpr int tail = 32;   ///< and of the rest; GCC would unroll a loop of 16 into scalars

  FSDP_HD constexpr int thread() const { return 0; }
  FSDP_HD constexpr int threads() const { return 1; }
  FSDP_HD void sync(SyncSite = SyncSite::here()) const {}

  template <class Out, class F, class... Views>
  [[gnu::always_inline]] FSDP_HD void each(std::int64_t n, Out* out, F f, Views... in) const {
    FSDP_INDEPENDENT
    for (std::int64_t i = 0; i < n; ++i) out[i] = narrow<Out>(f(detail::load(in, i)...));
  }

  template <class F, class... Views>
  [[gnu::always_inline]] FSDP_HD void update(std::int64_t n, F f, Views... views) const {
    FSDP_INDEPENDENT
    for (std::int64_t i = 0; i < n; ++i) detail::update_one(f, detail::Element<Views>(views, i)...);
  }

  template <class F, class... Views>
  [[gnu::always_inline]] FSDP_HD auto sum(std::int64_t n, F f, Views... in) const {
    using T = detail::Result<F, Views...>;
    static_assert(std::is_floating_point_v<T>, "the functor of a sum returns float or double");
    return reduce<T>(n, -T(0), Plus{}, [=](std::int64_t i) { return f(detail::load(in, i)...); }) + T(0);
  }

  template <class F, class... Views>
  [[gnu::always_inline]] FSDP_HD auto sum_pair(std::int64_t n, F f, Views... in) const {
    using P = detail::Result<F, Views...>;
    using T = decltype(P::first);
    T first[lanes];
    T second[lanes];
    fill(first, -T(0));
    fill(second, -T(0));
    std::int64_t const whole = n - n % lanes;
    for (std::int64_t i = 0; i < whole; i += lanes) {
      FSDP_INDEPENDENT
      for (int lane = 0; lane < lanes; ++lane) {
        P const term = f(detail::load(in, i + lane)...);
        first[lane] += term.first;
        second[lane] += term.second;
      }
    }
    if (whole == n) return P{halve(first, Plus{}) + T(0), halve(second, Plus{}) + T(0)};
    int const left = static_cast<int>(n - whole);
    T first_rest[lanes];
    T second_rest[lanes];
    FSDP_INDEPENDENT
    for (int lane = 0; lane < lanes; ++lane) {
      P const term = lane < left ? f(detail::load(in, whole + lane)...) : P{-T(0), -T(0)};
      first_rest[lane] = first[lane] + term.first;
      second_rest[lane] = second[lane] + term.second;
    }
    return P{halve(first_rest, Plus{}) + T(0), halve(second_rest, Plus{}) + T(0)};
  }

  template <class Out, class F, class... Views>
  [[gnu::always_inline]] FSDP_HD auto each_sum(std::int64_t n, Out* out, F f, Views... in) const {
    using T = detail::Result<F, Views...>;
    return reduce<T>(n, -T(0), Plus{},
                     [=](std::int64_t i) {
                       T const value = f(detail::load(in, i)...);
                       out[i] = narrow<Out>(value);
                       return value;
                     }) +
           T(0);
  }

  template <class F, class... Views>
  [[gnu::always_inline]] FSDP_HD auto max(std::int64_t n, F f, Views... in) const {
    using T = detail::Result<F, Views...>;
    return reduce<T>(n, detail::lowest<T>(), Larger{}, [=](std::int64_t i) { return f(detail::load(in, i)...); });
  }

 private:
  struct Plus {
    template <class T>
    FSDP_HD T operator()(T a, T b) const {
      return a + b;
    }
  };
  struct Larger {  // NaN is never larger
    template <class T>
    FSDP_HD T operator()(T a, T b) const {
      return a < b ? b : a;
    }
  };

  /// Combines value(i) for i in [0, n). `start` changes nothing that it is combined with; sums start with -0, which
  /// unlike 0 adds nothing to anything and is stored in whole vectors, not by a memset of narrower ones.
  template <class T, class Combine, class Value>
  [[gnu::always_inline]] FSDP_HD static T reduce(std::int64_t n, T start, Combine combine, Value value) {
    T partial[lanes];
    fill(partial, start);
    std::int64_t i = n - n % lanes;
    for (std::int64_t group = 0; group < i; group += lanes) {
      FSDP_INDEPENDENT
      for (int lane = 0; lane < lanes; ++lane) partial[lane] = combine(partial[lane], value(group + lane));
    }
    if (i == n) return halve(partial, combine);
    // The rest in groups of fixed length, the last one masked: a loop of unknown length would keep the accumulators out
    // of registers.
    T rest[tail];
    fill(rest, start);
    if (i + tail <= n) {
      FSDP_INDEPENDENT
      for (int lane = 0; lane < tail; ++lane) rest[lane] = combine(rest[lane], value(i + lane));
      i += tail;
    }
    int const left = static_cast<int>(n - i);
    T last[tail];
    FSDP_INDEPENDENT
    for (int lane = 0; lane < tail; ++lane) last[lane] = combine(rest[lane], lane < left ? value(i + lane) : start);
    T both[tail];
    for (int lane = 0; lane < tail; ++lane)
      both[lane] = combine(combine(partial[lane], partial[lane + tail]), last[lane]);
    return halve(both, combine);
  }

  template <std::size_t Count, class T>
  FSDP_HD static void fill(T (&partial)[Count], T start) {
    for (std::size_t lane = 0; lane < Count; ++lane) partial[lane] = start;
  }
  /// Combines the lanes by halves, each level in a new array: in place, values would travel through memory.
  template <std::size_t Count, class T, class Combine>
  FSDP_HD static T halve(T const (&value)[Count], Combine combine) {
    if constexpr (Count == 1) {
      return value[0];
    } else {
      T half[Count / 2];
      for (std::size_t lane = 0; lane < Count / 2; ++lane) half[lane] = combine(value[lane], value[lane + Count / 2]);
      return halve(half, combine);
    }
  }
};
static_assert(HostBlock::lanes == 2 * HostBlock::tail);

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
