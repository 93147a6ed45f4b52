// SPDX-License-Identifier: Apache-2.0
// Matrix products on the host, on the stream's threads: kernels of our own for fp32 where there is AVX-512, else
// OpenBLAS; oneDNN for bf16; plain loops under ThreadSanitizer, which cannot see into them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "fsdp/host.hpp"
#include "fsdp/kernels.hpp"
#include "transformer/math/gemm.hpp"
#include "transformer/math/thread_sanitizer.hpp"

#if defined(TRANSFORMER_THREAD_SANITIZER)
#define TRANSFORMER_PLAIN_GEMM 1
#endif

#if !defined(TRANSFORMER_PLAIN_GEMM)
#include <cblas.h>

#include "transformer/math/fp32_products.hpp"
#if TRANSFORMER_HAVE_ONEDNN  // of the target transformer_bf16
#include "transformer/math/bf16_products.hpp"
#endif
#endif

namespace transformer {

/// A product's results cut into tiles, which the threads of a stream share, each tile one call of OpenBLAS on one
/// thread.
///
/// [Note: Tiles depend on the shape alone] How OpenBLAS rounds may depend on the shape that it is asked for, so tiles
/// are the same for any number of threads, and with them the bits. OpenBLAS packs both operands of a call: a tile's
/// packing is to its products as 1 / rows + 1 / columns. Tiles of 512 by 768 cost 0.7 to 5 % of the time of a product
/// in one call, those of 192 by 384 cost 4 to 8 % (1024 rows of GPT-2 124M, OpenBLAS 0.3.21 with AVX-512, one thread,
/// on a machine with other work). So tiles are large, and there are no more than keep 16 threads busy.
struct HostTiles {
  struct Tile {
    std::int64_t row, column, rows, columns;
  };

  std::int64_t m, n;           // of the results
  std::int64_t rows, columns;  // of a tile; of the last ones what is left

  static constexpr std::int64_t most = 32;
  static constexpr std::int64_t least = 512 * 768;       ///< results of a tile
  static constexpr std::int64_t least_of_two = 1 << 16;  ///< the same where there would be one tile without
  static constexpr std::int64_t least_terms = 1 << 18;   ///< products of a tile of two, or of one row: 10 us or more

  static constexpr HostTiles of(std::int64_t m, std::int64_t n, std::int64_t k) {
    std::int64_t down = 1, across = 1;
    while (down * across < most) {
      std::int64_t const results = m * n / (2 * down * across);  // of tiles half as large
      bool const large = results >= least || (m == 1 && results * k >= least_terms);
      bool const first_two = down * across == 1 && results >= least_of_two && results * k >= least_terms;
      if (!large && !first_two) break;
      (m * across >= n * down ? down : across) *= 2;  // the longer side
    }
    return {m, n, part(m, down), part(n, across)};
  }
  constexpr std::int64_t across() const { return (n + columns - 1) / columns; }
  constexpr std::int64_t count() const { return (m + rows - 1) / rows * across(); }
  constexpr Tile at(std::int64_t index) const {
    std::int64_t const row = index / across() * rows, column = index % across() * columns;
    return {row, column, std::min(rows, m - row), std::min(columns, n - column)};
  }

 private:
  /// Whole vectors of 16, which all kernels of OpenBLAS compute alike.
  static constexpr std::int64_t part(std::int64_t length, std::int64_t parts) {
    std::int64_t const whole = ((length + parts - 1) / parts + 15) / 16 * 16;
    return std::max<std::int64_t>(1, std::min(length, whole));
  }
};

/// A product's results cut into about as equal tiles as threads share well, for kernels whose results do not depend on
/// how they are cut.
/// @param threads  2 tiles each, so that one that other work delays does not hold up all; one tile for one thread
inline HostTiles tiles_for_threads(std::int64_t m, std::int64_t n, std::int64_t k, int threads) {
  std::int64_t const most = threads <= 1 || m * n * k < 2 * HostTiles::least_terms ? 1 : 2 * threads;
  std::int64_t down = 1, across = 1;
  double best = std::numeric_limits<double>::infinity();
  for (std::int64_t i = 1; i <= most; ++i) {
    if (most % i != 0) continue;
    // Packing an element of B, of which each row of tiles does all, costs about twice as much as one of A.
    double const cost = static_cast<double>(2 * i) / static_cast<double>(std::max<std::int64_t>(m, 1)) +
                        static_cast<double>(most / i) / static_cast<double>(std::max<std::int64_t>(n, 1));
    if (cost < best) {
      best = cost;
      down = i;
      across = most / i;
    }
  }
  auto const part = [](std::int64_t length, std::int64_t parts, std::int64_t unit) {
    return std::max<std::int64_t>(1, std::min(length, ((length + parts - 1) / parts + unit - 1) / unit * unit));
  };
  return {m, n, part(m, down, 14), part(n, across, 32)};
}

/// Whether products of fp32 are made by multiply_fp32, where Gemm could choose. Tests say no, to reach OpenBLAS.
inline bool& uses_fp32_products() {
#if defined(TRANSFORMER_PLAIN_GEMM)
  static bool uses = false;
#else
  static bool uses = has_fp32_products();
#endif
  return uses;
}

/// Matrix products of float by kernels of our own where the processor is made for them, of float elsewhere and of
/// double by OpenBLAS, of bf16 by oneDNN where it is linked, each call on one thread. Of fp16, and of bf16 elsewhere,
/// by plain loops, which are there so that narrow models can be checked on the host.
template <>
class Gemm<fsdp::host::Device> {
 public:
  using Stream = fsdp::host::Device::Stream;

  static constexpr bool adds_bias = false;

  /// Whether products of T go so much faster than anything vectors do that attention had better be products.
  template <class T>
  static bool has_matrix_units() {
#if TRANSFORMER_HAVE_ONEDNN && !defined(TRANSFORMER_PLAIN_GEMM)
    if constexpr (std::is_same_v<T, fsdp::bf16>) return bf16_units() == "AMX";
#endif
    return false;
  }

  explicit Gemm(fsdp::host::Device const&) {
#if !defined(TRANSFORMER_PLAIN_GEMM)
    openblas_set_num_threads(1);
#endif
  }

  template <class T, class Out>
  void run(Stream& stream, Op op_a, Op op_b, std::int64_t m, std::int64_t n, std::int64_t k, GemmScalar<Out> alpha,
           T const* a, std::int64_t lda, T const* b, std::int64_t ldb, GemmScalar<Out> beta, Out* c, std::int64_t ldc) {
#if !defined(TRANSFORMER_PLAIN_GEMM)
    if constexpr (std::is_same_v<T, float>) {
      if (m > 1 && alpha == 1 && (beta == 0 || beta == 1) && uses_fp32_products()) {
        // Not by multiply(), which takes a row for a vector: whether a tile is one depends on the threads.
        auto const tiles = tiles_for_threads(m, n, k, stream.threads());
        stream.enqueue_parts(tiles.count(), [=](std::int64_t index) {
          auto const [row, column, rows, columns] = tiles.at(index);
          multiply_fp32({op_a, op_b, rows, columns, k, lda, ldb, ldc, beta == 1},
                        a + row * (op_a == Op::none ? lda : 1), b + column * (op_b == Op::none ? 1 : ldb),
                        c + row * ldc + column);
        });
        return;
      }
    }
#endif
    auto const tiles = HostTiles::of(m, n, k);
    stream.enqueue_parts(tiles.count(), [=](std::int64_t index) {
      auto const [row, column, rows, columns] = tiles.at(index);
      multiply(op_a, op_b, rows, columns, k, alpha, a + row * (op_a == Op::none ? lda : 1), lda,
               b + column * (op_b == Op::none ? 1 : ldb), ldb, beta, c + row * ldc + column, ldc);
    });
  }

  template <class T, class Out>
  void batched(Stream& stream, Op op_a, Op op_b, std::int64_t m, std::int64_t n, std::int64_t k, GemmScalar<Out> alpha,
               T const* a, std::int64_t lda, std::int64_t stride_a, T const* b, std::int64_t ldb, std::int64_t stride_b,
               GemmScalar<Out> beta, Out* c, std::int64_t ldc, std::int64_t stride_c, std::int64_t batch,
               Lower lower = Lower::none) {
    stream.enqueue_parts(batch, [=](std::int64_t i) {
      multiply(op_a, op_b, m, n, k, alpha, a + i * stride_a, lda, b + i * stride_b, ldb, beta, c + i * stride_c, ldc,
               lower);
    });
  }

 private:
  template <class T, class Out>
  static void multiply(Op op_a, Op op_b, std::int64_t m, std::int64_t n, std::int64_t k, GemmScalar<Out> alpha,
                       T const* a, std::int64_t lda, T const* b, std::int64_t ldb, GemmScalar<Out> beta, Out* c,
                       std::int64_t ldc, Lower = Lower::none) {
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
#if !defined(TRANSFORMER_PLAIN_GEMM)
  static CBLAS_TRANSPOSE blas(Op op) { return op == Op::none ? CblasNoTrans : CblasTrans; }
  static blasint size(std::int64_t value) { return static_cast<blasint>(value); }

  static void multiply(Op op_a, Op op_b, std::int64_t m, std::int64_t n, std::int64_t k, float alpha, float const* a,
                       std::int64_t lda, float const* b, std::int64_t ldb, float beta, float* c, std::int64_t ldc,
                       Lower lower = Lower::none) {
    if (m == 1 && op_a == Op::none) {  // a row times a matrix: bound by memory, and a matrix-vector product reads once
      bool const transposed = op_b == Op::transpose;
      cblas_sgemv(CblasRowMajor, transposed ? CblasNoTrans : CblasTrans, size(transposed ? n : k),
                  size(transposed ? k : n), alpha, b, size(ldb), a, 1, beta, c, 1);
      return;
    }
    if (alpha == 1.0f && (beta == 0.0f || beta == 1.0f) && uses_fp32_products())
      return multiply_fp32({op_a, op_b, m, n, k, lda, ldb, ldc, beta == 1.0f, lower}, a, b, c);
    cblas_sgemm(CblasRowMajor, blas(op_a), blas(op_b), size(m), size(n), size(k), alpha, a, size(lda), b, size(ldb),
                beta, c, size(ldc));
  }
  static void multiply(Op op_a, Op op_b, std::int64_t m, std::int64_t n, std::int64_t k, double alpha, double const* a,
                       std::int64_t lda, double const* b, std::int64_t ldb, double beta, double* c, std::int64_t ldc,
                       Lower = Lower::none) {
    cblas_dgemm(CblasRowMajor, blas(op_a), blas(op_b), size(m), size(n), size(k), alpha, a, size(lda), b, size(ldb),
                beta, c, size(ldc));
  }
#if TRANSFORMER_HAVE_ONEDNN
  template <class Out>
  static void multiply(Op op_a, Op op_b, std::int64_t m, std::int64_t n, std::int64_t k, float alpha,
                       fsdp::bf16 const* a, std::int64_t lda, fsdp::bf16 const* b, std::int64_t ldb, float beta, Out* c,
                       std::int64_t ldc, Lower = Lower::none) {
    if (alpha == 1.0f && (beta == 0.0f || beta == 1.0f) &&
        multiply_bf16({op_a, op_b, m, n, k, lda, ldb, ldc, beta == 1.0f, std::is_same_v<Out, float>}, a, b, c))
      return;
    multiply<fsdp::bf16, Out>(op_a, op_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
  }
#endif
#endif
};

}  // namespace transformer
