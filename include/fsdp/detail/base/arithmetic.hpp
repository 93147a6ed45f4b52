// SPDX-License-Identifier: Apache-2.0
// Floating-point arithmetic with equal bits: compiler flags that change results, and rounding modes of a thread.
#pragma once

#include <cstdint>

#include "fsdp/version.hpp"

// Sums in a written order, NaN, infinities, signed zeros: -fno-math-errno and -fno-trapping-math leave all that alone.
// g++ tells of every other flag; what clang++ keeps to itself is tried below. 16 evaluates fp16 alone as it is.
#if !defined(FSDP_ALLOW_FAST_MATH)
#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__ != 0) ||        \
    defined(__ASSOCIATIVE_MATH__) || defined(__RECIPROCAL_MATH__) || defined(__NO_SIGNED_ZEROS__) || \
    (defined(__GCC_IEC_559) && __GCC_IEC_559 == 0) ||                                                \
    (defined(__FLT_EVAL_METHOD__) && __FLT_EVAL_METHOD__ != 0 && __FLT_EVAL_METHOD__ != 16)
#error \
    "fsdp: a flag of this file changes floating-point results (-Ofast, -ffast-math, a part of it, or -mfpmath=387). Move the code that includes fsdp into a source file of its own, and compile that without the flag (docs/adopting.md, 'Trainers compiled with -Ofast'), or give up bitwise equal results with -DFSDP_ALLOW_FAST_MATH"
#endif
#endif

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

namespace detail {

// The control register for floating-point arithmetic of the calling thread, and its bits that are clear when a program
// starts: subnormal results or operands taken as zero, and rounding other than to nearest even.
#if defined(__SSE__)
inline constexpr std::uint64_t arithmetic_modes = 0x8000u | 0x6000u | 0x0040u;  // MXCSR: FZ, RC, DAZ
inline std::uint64_t read_arithmetic() { return __builtin_ia32_stmxcsr(); }
inline void write_arithmetic(std::uint64_t word) { __builtin_ia32_ldmxcsr(static_cast<unsigned>(word)); }
#elif defined(__aarch64__)
inline constexpr std::uint64_t arithmetic_modes = 0x1c80001u;  // FPCR: FZ, RMode, FZ16, FIZ
inline std::uint64_t read_arithmetic() {
  std::uint64_t word;
  asm volatile("mrs %0, fpcr" : "=r"(word)::"memory");
  return word;
}
inline void write_arithmetic(std::uint64_t word) { asm volatile("msr fpcr, %0" ::"r"(word) : "memory"); }
#else
inline constexpr std::uint64_t arithmetic_modes = 0;
inline std::uint64_t read_arithmetic() { return 0; }
inline void write_arithmetic(std::uint64_t) {}
#endif

}  // namespace detail

/// While this object lives, the calling thread computes as IEEE 754 says: subnormals are kept, results are rounded to
/// nearest.
///
/// A program linked with -Ofast or -ffast-math starts with subnormals taken as zero, and every thread inherits that
/// from the one that starts it. Tasks of host streams run inside such a scope; what runs beside them keeps its modes.
class IeeeArithmetic {
 public:
  IeeeArithmetic() : before_(detail::read_arithmetic()) {
    if ((before_ & detail::arithmetic_modes) != 0) detail::write_arithmetic(before_ & ~detail::arithmetic_modes);
  }
  IeeeArithmetic(IeeeArithmetic const&) = delete;
  IeeeArithmetic& operator=(IeeeArithmetic const&) = delete;
  ~IeeeArithmetic() {
    auto const modes = before_ & detail::arithmetic_modes;
    if (modes != 0) detail::write_arithmetic((detail::read_arithmetic() & ~detail::arithmetic_modes) | modes);
  }

 private:
  std::uint64_t before_;
};

namespace detail {

/// A source file whose compiler flags were found by a test at start-up.
struct FastMathFile {
  char const* name = nullptr;  ///< nullptr: there is none
  char const* flag = "";       ///< the flag that it was compiled with, or one that stands for it
};
inline FastMathFile fast_math_file;

}  // namespace detail

#if defined(__clang__) && !defined(FSDP_ALLOW_FAST_MATH)
/// [Note: Flags without a macro] clang++ defines macros for -ffast-math and -ffinite-math-only, and none for the flags
/// that these are made of. So every file that includes fsdp computes, before main, what such a flag changes; engines
/// ask for the outcome. Operands are volatile: a compiler that keeps to IEEE 754 must compute all of it, and without
/// optimisation the flags change nothing. Not an inline variable: each file has flags of its own.
[[maybe_unused]] static bool const arithmetic_was_tried = [] {
  float volatile one = 1.0f, three = 3.0f, five = 5.0f, large = 0x1p30f, minus_zero = -0.0f;
  float volatile infinity = __builtin_huge_valf(), nan = __builtin_nanf("");
  float const a = one, b = large, x = five, z = minus_zero, i = infinity, n = nan;
  float volatile const quotient = x / three;
  char const* flag = nullptr;
  if (!__builtin_isinf(i)) flag = "-fno-honor-infinities";
  if (n == n) flag = "-fno-honor-nans";
  if (__builtin_signbit(z + 0.0f)) flag = "-fno-signed-zeros";
  if (x / 3.0f != quotient) flag = "-freciprocal-math";
  if ((a + b) - b != 0.0f) flag = "-fassociative-math";
  if (flag != nullptr) detail::fast_math_file = {__BASE_FILE__, flag};
  return true;
}();
#endif

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
