// SPDX-License-Identifier: Apache-2.0
// Matrix products on the host: OpenBLAS on the stream's worker; plain loops under ThreadSanitizer, which cannot see
// into OpenBLAS.
#pragma once

#include <cstdint>

#include "fsdp/host/device.hpp"
#include "fsdp/kernels/block.hpp"
#include "gemm.hpp"

#if defined(__SANITIZE_THREAD__)
#define NANOGPT_PLAIN_GEMM 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define NANOGPT_PLAIN_GEMM 1
#endif
#endif

#if !defined(NANOGPT_PLAIN_GEMM)
#include <cblas.h>
#endif

namespace nanogpt {

/// Matrix products of float and double by OpenBLAS, each worker with one thread; of bf16 and fp16 by plain loops, which
/// are there so that narrow models can be checked on the host.
template <>
class Gemm<fsdp::host::Device> {
 public:
  using Stream = fsdp::host::Device::Stream;

  static constexpr bool adds_bias = false;

  explicit Gemm(fsdp::host::Device const&) {
#if !defined(NANOGPT_PLAIN_GEMM)
    openblas_set_num_threads(1);
#endif
  }

  template <class T, class Out>
  void run(Stream& stream, Op op_a, Op op_b, std::int64_t m, std::int64_t n, std::int64_t k, GemmScalar<Out> alpha,
           T const* a, std::int64_t lda, T const* b, std::int64_t ldb, GemmScalar<Out> beta, Out* c, std::int64_t ldc) {
    stream.enqueue([=] { multiply(op_a, op_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc); });
  }

  template <class T, class Out>
  void batched(Stream& stream, Op op_a, Op op_b, std::int64_t m, std::int64_t n, std::int64_t k, GemmScalar<Out> alpha,
               T const* a, std::int64_t lda, std::int64_t stride_a, T const* b, std::int64_t ldb, std::int64_t stride_b,
               GemmScalar<Out> beta, Out* c, std::int64_t ldc, std::int64_t stride_c, std::int64_t batch) {
    stream.enqueue([=] {
      for (std::int64_t i = 0; i < batch; ++i) {
        multiply(op_a, op_b, m, n, k, alpha, a + i * stride_a, lda, b + i * stride_b, ldb, beta, c + i * stride_c, ldc);
      }
    });
  }

 private:
  template <class T, class Out>
  static void multiply(Op op_a, Op op_b, std::int64_t m, std::int64_t n, std::int64_t k, GemmScalar<Out> alpha,
                       T const* a, std::int64_t lda, T const* b, std::int64_t ldb, GemmScalar<Out> beta, Out* c,
                       std::int64_t ldc) {
    using Sum = GemmScalar<Out>;
    for (std::int64_t row = 0; row < m; ++row) {
      for (std::int64_t column = 0; column < n; ++column) {
        Sum sum = 0;
        for (std::int64_t i = 0; i < k; ++i) {
          sum += fsdp::widen(op_a == Op::none ? a[row * lda + i] : a[i * lda + row]) *
                 fsdp::widen(op_b == Op::none ? b[i * ldb + column] : b[column * ldb + i]);
        }
        Out& result = c[row * ldc + column];
        result = fsdp::narrow<Out>(alpha * sum + (beta == Sum{0} ? Sum{0} : beta * fsdp::widen(result)));
      }
    }
  }
#if !defined(NANOGPT_PLAIN_GEMM)
  static CBLAS_TRANSPOSE blas(Op op) { return op == Op::none ? CblasNoTrans : CblasTrans; }
  static blasint size(std::int64_t value) { return static_cast<blasint>(value); }

  static void multiply(Op op_a, Op op_b, std::int64_t m, std::int64_t n, std::int64_t k, float alpha, float const* a,
                       std::int64_t lda, float const* b, std::int64_t ldb, float beta, float* c, std::int64_t ldc) {
    if (m == 1 && op_a == Op::none) {  // a row times a matrix: bound by memory, and a matrix-vector product reads once
      bool const transposed = op_b == Op::transpose;
      cblas_sgemv(CblasRowMajor, transposed ? CblasNoTrans : CblasTrans, size(transposed ? n : k),
                  size(transposed ? k : n), alpha, b, size(ldb), a, 1, beta, c, 1);
      return;
    }
    cblas_sgemm(CblasRowMajor, blas(op_a), blas(op_b), size(m), size(n), size(k), alpha, a, size(lda), b, size(ldb),
                beta, c, size(ldc));
  }
  static void multiply(Op op_a, Op op_b, std::int64_t m, std::int64_t n, std::int64_t k, double alpha, double const* a,
                       std::int64_t lda, double const* b, std::int64_t ldb, double beta, double* c, std::int64_t ldc) {
    cblas_dgemm(CblasRowMajor, blas(op_a), blas(op_b), size(m), size(n), size(k), alpha, a, size(lda), b, size(ldb),
                beta, c, size(ldc));
  }
#endif
};

}  // namespace nanogpt
