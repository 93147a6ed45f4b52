// SPDX-License-Identifier: Apache-2.0
// Matrix products of fp32 operands on the host, by kernels of our own where the processor has AVX-512.
#pragma once

#include <cstdint>

#include "transformer/math/gemm.hpp"

namespace transformer {

/// A product of row-major matrices as Gemm has it, with alpha = 1.
struct Fp32Product {
  Op op_a, op_b;
  std::int64_t m, n, k, lda, ldb, ldc;
  bool adds;                  ///< C += the product; else C =, which is not read
  Lower lower = Lower::none;  ///< spares about half of the work where A or C is square
};

/// Whether this processor, and its operating system, have what multiply_fp32 is made of.
bool has_fp32_products();

/// C = op_a(A) op_b(B), or C += it, on the calling thread alone.
///
/// Every element of C is a sum of blocks, each summed with fused multiply-add in the order of k; how long a block is
/// follows from k. So any part of C, computed by itself, has the bits that it has in the whole. Where A is a lower
/// trapezoid, up to 13 of its zeros beside the others are multiplied too.
/// @pre has_fp32_products()
void multiply_fp32(Fp32Product const& product, float const* a, float const* b, float* c);

}  // namespace transformer
