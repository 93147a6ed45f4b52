// SPDX-License-Identifier: Apache-2.0
// Matrix products: the interface that every device's Gemm has.
#pragma once

#include <cstdint>
#include <type_traits>

namespace transformer {

/// Whether an operand is used as stored or transposed.
enum class Op : unsigned char { none, transpose };

/// The matrix of a product that is a lower trapezoid: element (r, c) of (rows, columns) lies in it if c - r <= columns
/// - rows.
enum class Lower : unsigned char {
  none,
  left,    ///< A, as stored: elements outside are 0, and may be left out of the sums
  result,  ///< C: elements outside are not wanted, and may be left as they are
};

/// The type of alpha and beta for results of type `Out`.
template <class Out>
using GemmScalar = std::conditional_t<std::is_same_v<Out, double>, double, float>;

/// C = alpha * op_a(A) * op_b(B) + beta * C, with every matrix ROW-MAJOR: op_a(A) is (m, k), op_b(B) is (k, n), C is
/// (m, n); a leading dimension is the distance between two rows as stored, in elements. With beta = 0, C is not read.
/// The products are summed in fp32 at least (in fp64 for double). T: float, double, bf16 or fp16; Out: T, or float for
/// results of narrow operands that are added up (weight gradients).
///
/// Each device specialises this class (gemm_host.hpp, gemm_cuda.hpp) with
/// @code
///   explicit Gemm(D const& device);
///   static constexpr bool adds_bias;  // whether there is run_with_bias: run with beta = 0, and a row (n) added to all
///
///   template <class T, class Out>
///   void run(Stream& stream, Op op_a, Op op_b, std::int64_t m, std::int64_t n, std::int64_t k,
///            GemmScalar<Out> alpha, T const* a, std::int64_t lda, T const* b, std::int64_t ldb,
///            GemmScalar<Out> beta, Out* c, std::int64_t ldc);
///
///   // `batch` products; matrix i of an operand starts i strides after the first. `lower` may spare work.
///   template <class T, class Out>
///   void batched(Stream& stream, Op op_a, Op op_b, std::int64_t m, std::int64_t n, std::int64_t k,
///                GemmScalar<Out> alpha, T const* a, std::int64_t lda, std::int64_t stride_a,
///                T const* b, std::int64_t ldb, std::int64_t stride_b,
///                GemmScalar<Out> beta, Out* c, std::int64_t ldc, std::int64_t stride_c, std::int64_t batch, Lower
///                lower = Lower::none);
/// @endcode
/// One Gemm serves one stream: it may own a workspace that its products share.
/// @note Stream: both calls only enqueue.
template <class D>
class Gemm;

/// y (rows, out) = x (rows, in) W^T, with W (out, in) as nn.Linear stores it; y's rows are `stride` apart.
template <class D, class T>
void linear(Gemm<D>& gemm, typename D::Stream& stream, std::int64_t rows, std::int64_t in, std::int64_t out, T const* x,
            T const* weight, T* y, std::int64_t stride) {
  gemm.run(stream, Op::none, Op::transpose, rows, out, in, 1, x, in, weight, in, 0, y, stride);
}

/// dW (out, in) += dy^T (out, rows) x (rows, in); dy's rows are `stride` apart. A null gradient: nothing.
/// @param fresh  dW is undefined: =, not +=
template <class D, class T, class G>
void linear_weight_gradient(Gemm<D>& gemm, typename D::Stream& stream, std::int64_t rows, std::int64_t in,
                            std::int64_t out, T const* x, T const* dy, std::int64_t stride, G* weight_gradient,
                            bool fresh = false) {
  if (weight_gradient == nullptr) return;
  gemm.run(stream, Op::transpose, Op::none, out, in, rows, 1, dy, stride, x, in, fresh ? 0 : 1, weight_gradient, in);
}

/// dx (rows, in) = dy (rows, out) W; dy's rows are `stride` apart.
template <class D, class T>
void linear_input_gradient(Gemm<D>& gemm, typename D::Stream& stream, std::int64_t rows, std::int64_t in,
                           std::int64_t out, T const* dy, std::int64_t stride, T const* weight, T* dx) {
  gemm.run(stream, Op::none, Op::none, rows, in, out, 1, dy, stride, weight, in, 0, dx, in);
}

}  // namespace transformer
