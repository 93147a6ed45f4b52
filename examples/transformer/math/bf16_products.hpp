// SPDX-License-Identifier: Apache-2.0
// Matrix products of bf16 operands on the processor's own bf16 units, by oneDNN, where the program is built with it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "fsdp/tensor.hpp"
#include "transformer/math/gemm.hpp"

namespace transformer {

/// The units that oneDNN would multiply bf16 with on this processor, such as "AMX" or "AVX-512 BF16"; empty if it has
/// none, if ONEDNN_MAX_CPU_ISA forbids them, or if the program was built without oneDNN.
std::string_view bf16_units();

/// The version of the loaded oneDNN, such as "2.6.3", or "not built in".
std::string onednn_version();

/// A product of row-major matrices as Gemm has it, with alpha = 1.
struct Bf16Product {
  Op op_a, op_b;
  std::int64_t m, n, k, lda, ldb, ldc;
  bool adds;         ///< C += the product; else C =
  bool wide_result;  ///< C is fp32; else bf16, rounded once

  bool operator==(Bf16Product const&) const = default;
};

/// C = op_a(A) op_b(B), or C += it, summed in fp32, on the calling thread alone.
/// @param c  as product.wide_result says; not read unless product.adds
/// @return false, and nothing is done, if oneDNN has no kernel for it here
bool multiply_bf16(Bf16Product const& product, fsdp::bf16 const* a, fsdp::bf16 const* b, void* c);

}  // namespace transformer
