// SPDX-License-Identifier: Apache-2.0
// The Block: what a single-source kernel is written against, and its model on the host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "fsdp/scalar_math.hpp"
#include "fsdp/tensor.hpp"

// The loop that follows has no dependence between iterations: views are equal or disjoint.
// Clang checks for overlap at run time instead: its pragma makes an error of a loop that it leaves scalar.
#if defined(__CUDACC__) || defined(__clang__)
#define FSDP_INDEPENDENT
#else
#define FSDP_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace fsdp {

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
/// - `block.sync()`                        earlier writes of the block are visible to the whole block
///
/// Reductions give every thread the result and are also a `sync`. Between `each` or `update` and a read of what it
/// wrote, by anything but the same operation with the same n and element types, a `sync` or a reduction is needed.
/// Sums run in an order that depends on n and the model of Block alone, so results repeat bitwise.

/// Two sums, or what is added to them.
template <class T>
struct Pair {
  T first, second;
};

/// A view whose element i is `first + i`.
struct Indices {
  std::int64_t first = 0;
};

/// The type that arithmetic on elements of type T is done in.
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

/// Element as it is computed with.
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

/// What `update` hands to its functor for one element: a value of a const view, or a value that is written back.
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

/// Start of a maximum.
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
struct HostBlock {
  static constexpr int lanes = 64;  ///< accumulators of a reduction

  FSDP_HD constexpr int thread() const { return 0; }
  FSDP_HD constexpr int threads() const { return 1; }
  FSDP_HD void sync() const {}

  template <class Out, class F, class... Views>
  FSDP_HD void each(std::int64_t n, Out* out, F f, Views... in) const {
    FSDP_INDEPENDENT
    for (std::int64_t i = 0; i < n; ++i) out[i] = narrow<Out>(f(detail::load(in, i)...));
  }

  template <class F, class... Views>
  FSDP_HD void update(std::int64_t n, F f, Views... views) const {
    FSDP_INDEPENDENT
    for (std::int64_t i = 0; i < n; ++i) detail::update_one(f, detail::Element<Views>(views, i)...);
  }

  template <class F, class... Views>
  FSDP_HD auto sum(std::int64_t n, F f, Views... in) const {
    using T = detail::Result<F, Views...>;
    static_assert(std::is_floating_point_v<T>, "the functor of a sum returns float or double");
    T partial[lanes];
    clear(partial);
    std::int64_t const whole = n - n % lanes;
    for (std::int64_t i = 0; i < whole; i += lanes) {
      FSDP_INDEPENDENT
      for (int lane = 0; lane < lanes; ++lane) partial[lane] += f(detail::load(in, i + lane)...);
    }
    if (whole == n) return fold(partial);
    // The rest as one masked group: a loop of unknown length would keep the accumulators out of registers.
    int const left = static_cast<int>(n - whole);
    T rest[lanes];
    FSDP_INDEPENDENT
    for (int lane = 0; lane < lanes; ++lane) {
      rest[lane] = partial[lane];
      if (lane < left) rest[lane] += f(detail::load(in, whole + lane)...);
    }
    return fold(rest);
  }

  template <class F, class... Views>
  FSDP_HD auto sum_pair(std::int64_t n, F f, Views... in) const {
    using P = detail::Result<F, Views...>;
    using T = decltype(P::first);
    T first[lanes];
    T second[lanes];
    clear(first);
    clear(second);
    std::int64_t const whole = n - n % lanes;
    for (std::int64_t i = 0; i < whole; i += lanes) {
      FSDP_INDEPENDENT
      for (int lane = 0; lane < lanes; ++lane) {
        P const term = f(detail::load(in, i + lane)...);
        first[lane] += term.first;
        second[lane] += term.second;
      }
    }
    if (whole == n) return P{fold(first), fold(second)};
    int const left = static_cast<int>(n - whole);
    T first_rest[lanes];
    T second_rest[lanes];
    FSDP_INDEPENDENT
    for (int lane = 0; lane < lanes; ++lane) {
      first_rest[lane] = first[lane];
      second_rest[lane] = second[lane];
      if (lane < left) {
        P const term = f(detail::load(in, whole + lane)...);
        first_rest[lane] += term.first;
        second_rest[lane] += term.second;
      }
    }
    return P{fold(first_rest), fold(second_rest)};
  }

  template <class Out, class F, class... Views>
  FSDP_HD auto each_sum(std::int64_t n, Out* out, F f, Views... in) const {
    using T = detail::Result<F, Views...>;
    T partial[lanes];
    clear(partial);
    std::int64_t const whole = n - n % lanes;
    for (std::int64_t i = 0; i < whole; i += lanes) {
      FSDP_INDEPENDENT
      for (int lane = 0; lane < lanes; ++lane) {
        T const value = f(detail::load(in, i + lane)...);
        partial[lane] += value;
        out[i + lane] = narrow<Out>(value);
      }
    }
    if (whole == n) return fold(partial);
    int const left = static_cast<int>(n - whole);
    T rest[lanes];
    FSDP_INDEPENDENT
    for (int lane = 0; lane < lanes; ++lane) {
      rest[lane] = partial[lane];
      if (lane < left) {
        T const value = f(detail::load(in, whole + lane)...);
        rest[lane] += value;
        out[whole + lane] = narrow<Out>(value);
      }
    }
    return fold(rest);
  }

  template <class F, class... Views>
  FSDP_HD auto max(std::int64_t n, F f, Views... in) const {
    using T = detail::Result<F, Views...>;
    T partial[lanes];
    for (int lane = 0; lane < lanes; ++lane) partial[lane] = detail::lowest<T>();
    std::int64_t const whole = n - n % lanes;
    for (std::int64_t i = 0; i < whole; i += lanes) {
      FSDP_INDEPENDENT
      for (int lane = 0; lane < lanes; ++lane) {
        T const value = f(detail::load(in, i + lane)...);
        partial[lane] = partial[lane] < value ? value : partial[lane];
      }
    }
    auto const larger = [](T a, T b) { return a < b ? b : a; };
    if (whole == n) return halve(partial, larger);
    int const left = static_cast<int>(n - whole);
    T rest[lanes];
    FSDP_INDEPENDENT
    for (int lane = 0; lane < lanes; ++lane) {
      T const value = lane < left ? f(detail::load(in, whole + lane)...) : detail::lowest<T>();
      rest[lane] = larger(partial[lane], value);
    }
    return halve(rest, larger);
  }

 private:
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
  /// -0 adds nothing to anything, and unlike 0 it is stored in whole vectors, not by a memset of narrower ones.
  template <class T>
  FSDP_HD static void clear(T (&partial)[lanes]) {
    for (int lane = 0; lane < lanes; ++lane) partial[lane] = -T(0);
  }
  template <class T>
  FSDP_HD static T fold(T const (&partial)[lanes]) {
    return halve(partial, [](T a, T b) { return a + b; }) + T(0);
  }
};

}  // namespace fsdp
